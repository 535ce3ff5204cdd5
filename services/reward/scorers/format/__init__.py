"""The format checker."""
