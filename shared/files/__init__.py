"""Atomic and durable files, and files with secrets."""
