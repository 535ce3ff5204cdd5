"""Scorers: each gives every sample of a group a value."""
