"""Run a model's programs in isolation (docs/sandbox.md)."""
