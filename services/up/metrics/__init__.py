"""Prometheus for a local run."""
