"""Experts of the tokens that a vLLM worker draws (``trainer.router_replay``)."""
