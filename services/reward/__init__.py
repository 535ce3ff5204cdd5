"""Reward service: score every sample."""
