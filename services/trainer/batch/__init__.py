"""From groups to micro-batches: which groups are fresh enough, which rows they share, and what each forward pass costs."""
