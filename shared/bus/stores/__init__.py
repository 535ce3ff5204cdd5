"""Typed stores on the bus: the ledger and small records beside it."""
