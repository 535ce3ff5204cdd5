"""Weight snapshots and their transports."""
