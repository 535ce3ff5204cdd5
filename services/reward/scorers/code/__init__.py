"""The code scorer: programs and tests go to the executor; expected values stay here.

completion ──▶ program ──▶ executor ──▶ plain results ──▶ the tests' asserts
"""
