"""Inference engines behind one protocol (``engine``): vLLM, embedded transformers, and a scripted one for tests."""
