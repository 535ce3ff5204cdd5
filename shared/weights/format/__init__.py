"""Layouts, checksums, manifests and snapshot files."""

BUCKET_BYTES = 512 << 20
"""Maximum bucket size, unless a tensor is larger: few transfers, small enough to stage on a GPU."""
