"""The training step and its checkpoints."""
