"""Client of the coordinator's HTTP API, used by the command line and by ``penstock up``. It imports no service."""
