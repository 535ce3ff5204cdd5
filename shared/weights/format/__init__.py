"""Formats of weights: layouts, checksums, manifests and snapshot files."""
