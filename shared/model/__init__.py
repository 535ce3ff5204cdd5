"""Model parts shared by trainer, reward and rollout."""
