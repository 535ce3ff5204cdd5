"""The update rule. ``update`` is one step in the order of the algorithm; the other modules are its formulas.

rewards ──▶ advantages ──▶ token_advantages ──▶ objective ──▶ step
                                                   ▲
                    losses, corrections, kl, dpo, aggregation
"""
