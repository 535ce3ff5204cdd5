"""Inference engines behind one protocol (``engine``)."""
