"""Reward models and the frozen reference, with batches filled across groups."""
