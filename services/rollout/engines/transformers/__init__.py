"""The embedded engine: Hugging Face transformers in a thread of its own. It needs neither vLLM nor a GPU."""
