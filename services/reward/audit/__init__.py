"""Audit of rewards: recorded groups scored again by stricter variants of their scorers."""
