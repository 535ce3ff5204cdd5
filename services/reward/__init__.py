"""Reward: a score for every sample, or the word that it could not be scored."""
