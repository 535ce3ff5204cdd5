"""Rollout: generate completions for prompts with the newest weights."""
