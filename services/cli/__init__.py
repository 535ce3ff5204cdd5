"""The ``penstock`` command line.

__main__ ──▶ services.up            a run on this machine
    │
    ├─────▶ commands, export ──▶ services.client ──▶ the coordinator's HTTP API
    └─────▶ settings_help           every setting with its type, default and docstring
"""
