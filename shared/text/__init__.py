"""Redact secrets and escape terminal control characters."""
