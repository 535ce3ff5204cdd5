"""Typed stores on the bus: the ledger of the run and its policy, and small records beside it."""
