"""The embedded engine: Hugging Face transformers in its own thread."""
