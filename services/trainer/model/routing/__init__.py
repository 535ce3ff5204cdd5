"""Mixtures of experts: experts by groups of their tokens, and routes as the replicas had them (``trainer.router_replay``)."""
