"""Typed stores on the bus; each change of several keys is one script.

policy      the ledger, the versions and what is decided about them
replicas    heartbeats, and what replicas read: settings, cordons, device leases
experience  prompts that failed, and statistics of rewards
run         who owns and leads the run, its records, and what was asked of it
"""
