"""The update rule: ``update`` is one step; other modules are formulas.

rewards ──▶ advantages ──▶ token_advantages ──▶ objective ──▶ step
                                                   ▲
                    losses, corrections, kl, dpo, aggregation
"""
