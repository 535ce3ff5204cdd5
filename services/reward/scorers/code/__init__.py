"""The code scorer. Expected values never reach the executor.

completion ──▶ program ──▶ executor ──▶ plain results ──▶ the tests' asserts
"""
