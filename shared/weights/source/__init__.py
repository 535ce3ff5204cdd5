"""The serving side of weight pulls, in the trainer and in relaying replicas."""
