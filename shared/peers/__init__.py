"""Connections between processes beside the bus: addresses, framing, mutual proof of a shared secret."""
