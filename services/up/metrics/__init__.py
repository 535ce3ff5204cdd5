"""Prometheus for a run on this machine: its process and its targets."""
