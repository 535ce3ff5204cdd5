"""Connections between processes beside the bus."""
