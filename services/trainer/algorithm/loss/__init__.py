"""Formulas of the loss; none of them knows packing, ranks or DeepSpeed.

losses × corrections ─┐
kl, dpo ──────────────┴──▶ objective ──▶ aggregation (from tokens to one number)
"""
