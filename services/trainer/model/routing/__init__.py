"""Routing of mixtures of experts as the replicas did it (``trainer.router_replay``)."""
