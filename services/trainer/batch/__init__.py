"""From groups to micro-batches: freshness, packing into rows, and cost of forward passes."""
