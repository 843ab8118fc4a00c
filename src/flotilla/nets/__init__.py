"""Modules with parameters and no loss, used by several algorithms."""
