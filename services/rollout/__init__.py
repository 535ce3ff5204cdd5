"""Rollout: a group of completions for every prompt, under the newest weights."""
