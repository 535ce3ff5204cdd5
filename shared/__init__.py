"""Shared by the services: messages, bus, ledger, weights, settings. Imports no service."""
