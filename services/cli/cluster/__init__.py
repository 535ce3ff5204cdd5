"""Runs on Kubernetes: ``penstock deploy``, and how other commands reach what it started."""
