"""Talks to Redis or Valkey; only ``penstock.shared.bus`` uses it.

commands (typed, on a run's keys) ──▶ server (waits while it is away) ──▶ connection (by URL)
        └──▶ lua (scripts with named keys and arguments)
"""
