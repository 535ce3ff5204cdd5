"""Settings of the reward service and of its scorers."""
