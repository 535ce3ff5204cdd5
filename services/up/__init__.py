"""``penstock up``: run and supervise a whole run on this machine, one process per service."""
