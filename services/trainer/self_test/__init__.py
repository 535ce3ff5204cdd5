"""Self-test: the policy, as trained, against transformers' unmodified model."""
