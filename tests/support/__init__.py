"""Shared test tools: servers, tiny models, processes and tables of expectations."""
