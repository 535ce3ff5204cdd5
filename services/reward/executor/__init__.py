"""The code executor: runs a model's programs in isolation. See docs/sandbox.md."""
