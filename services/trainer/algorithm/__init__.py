"""The update rule: ``update`` is one step; the other modules are its formulas.

rewards ──▶ advantages ──▶ token_advantages ──▶ objective ──▶ step
                                                   ▲
                    losses, corrections, kl, dpo, aggregation
"""
