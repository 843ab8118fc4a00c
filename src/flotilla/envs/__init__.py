"""Layer 1: single environments, one file a suite."""
