"""Schemas of the HTTP API."""
