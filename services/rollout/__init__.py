"""Rollout: generate a group of completions for every prompt with the newest weights."""
