"""The ``penstock`` command line.

__main__ ──▶ penstock.services.up            a run on this machine
    │
    ├─────▶ commands, export ──▶ penstock.services.client ──▶ the HTTP API
    └─────▶ settings_help           every setting
"""
