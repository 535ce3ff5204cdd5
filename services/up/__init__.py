"""``penstock up``: a whole run on this machine, one process a service, looked after until it ends."""
