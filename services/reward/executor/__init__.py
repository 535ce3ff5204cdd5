"""The code executor: runs programs that a model wrote, isolated, and says what became of them. See docs/sandbox.md."""
