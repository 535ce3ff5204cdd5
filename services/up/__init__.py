"""``penstock up``: supervise a whole run on this machine."""
