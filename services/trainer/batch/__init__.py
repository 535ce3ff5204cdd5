"""From groups to micro-batches."""
