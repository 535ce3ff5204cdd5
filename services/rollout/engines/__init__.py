"""Inference engines behind one protocol (``engine``): vLLM, transformers in this process, and a script for tests."""
