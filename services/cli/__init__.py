"""The ``penstock`` command line.

__main__ ──▶ services.up            a run on this machine
    │
    ├─────▶ commands, export ──▶ services.client ──▶ the HTTP API
    └─────▶ settings_help           every setting
"""
