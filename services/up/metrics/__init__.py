"""Prometheus for a local run: its process and its targets."""
