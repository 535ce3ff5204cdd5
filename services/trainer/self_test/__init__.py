"""Self-test at the start: the policy, as training runs it, against transformers' unmodified model."""
