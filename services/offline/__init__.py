"""Use a stored policy on this machine, without a run.

::

    stored ── a run's version in Hugging Face form ──▶ generation ──▶ policy, evaluation
"""
