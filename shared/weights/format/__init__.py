"""Formats of weights: layout in flat memory, buckets with checksums, manifest and snapshot files."""
