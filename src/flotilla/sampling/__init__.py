"""Layer 2: many environments, stepped together, as rows."""
