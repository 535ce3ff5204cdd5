"""Layouts, checksums, manifests and snapshot files."""
