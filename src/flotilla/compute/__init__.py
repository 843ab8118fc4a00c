"""Layer 3: ranks, optimizers, statistics, checkpoints."""
