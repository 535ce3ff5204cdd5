"""Follow a run and show it: a live screen at a terminal, plain lines elsewhere."""
