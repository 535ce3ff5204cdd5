"""Equality of formulas: exact and in process if simple, otherwise math-verify in a killable process."""
