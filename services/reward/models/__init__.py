"""Models of the reward service: reward models and the frozen reference, with batches filled across groups."""
