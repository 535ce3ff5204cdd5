"""The update rule: ``update`` is one step, in the order of the algorithm.

::

    rewards ──▶ advantages ──▶ token_advantages ──▶ kinds ──▶ backward ──▶ optimizer
                                                      ▲
                       rules: one file for each loss ─┘ ◀── loss: parts of formulas that they share
"""
