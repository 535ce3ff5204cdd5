"""The update rule: ``update`` is one step.

rewards ──▶ advantages ──▶ token_advantages ──▶ objective ──▶ step
                                                   ▲
                              loss: formulas of the objective
"""
