"""What a checkpoint holds of an engine: copied to the host's memory, written beside training."""
