"""The run's state and the policy's history.

ledger (state, head, journal) ── policies (versions) ── rollback ── evaluations ── held_out ── exports
"""
