"""Held-out evaluation.

evaluator ──▶ results ──▶ statistics ──▶ regression_gate ──▶ rollback
"""
