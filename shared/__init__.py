"""What the services agree on: messages, streams, the bus, the ledger, weights, settings. It imports no service."""
