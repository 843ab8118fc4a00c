"""Flotilla: deep reinforcement learning on many environments in parallel (importing it does not import torch)."""

from importlib.metadata import version

__version__ = version("flotilla")
