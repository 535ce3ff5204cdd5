"""Scorers, graders and the executor."""
