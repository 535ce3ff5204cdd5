"""Shared by the services: messages, bus, ledger, weights, settings. Imports no service."""

if __name__ != "penstock.shared":
    raise ImportError("import penstock.shared: `shared` is its folder")
