"""The user's own Python function as a scorer."""
