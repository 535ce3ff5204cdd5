"""The serving side of a pull of weights: in the trainer, and in replicas that relay."""
