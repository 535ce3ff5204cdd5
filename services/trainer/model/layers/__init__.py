"""Layers of packed rows: attention, recurrences, convolutions and logits that respect the boundaries of sequences."""
