"""Schemas of the HTTP API: the contract that clients read."""
