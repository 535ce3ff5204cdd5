"""Show a run: a live screen at a terminal, plain lines elsewhere."""
