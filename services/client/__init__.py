"""Client of the coordinator's HTTP API. It imports no service."""
