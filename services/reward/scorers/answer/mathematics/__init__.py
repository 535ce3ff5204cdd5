"""Equality of numbers, read exactly in process, and of formulas, by math-verify in a killable process."""
