"""Audit of rewards with stricter scorers."""
