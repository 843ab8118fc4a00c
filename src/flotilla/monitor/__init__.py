"""Layer 4: what people see of a run, and nothing that a run needs to learn."""
