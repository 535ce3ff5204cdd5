"""Long-running operations and dead letters, kept on the bus."""
