"""Whether two formulas are equal: exactly and in process where they are simple, else by math-verify in a killable process."""
