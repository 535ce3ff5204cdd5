"""Read settings from TOML, the environment and flags.

::

    loading ──▶ Settings
       └─ explanations: what is wrong with a value, in a sentence
"""
