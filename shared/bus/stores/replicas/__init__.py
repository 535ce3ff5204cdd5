"""Between the coordinator and each replica.

heartbeats, questions' answers ◀── replica ──▶ reads: cordon, live_settings, device_leases, run_secret, questions
"""
