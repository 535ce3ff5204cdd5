"""The embedded engine: Hugging Face transformers in its own thread, without vLLM or a GPU."""
