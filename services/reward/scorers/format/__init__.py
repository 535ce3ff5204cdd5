"""The format checker: declared rules, among them JSON schemas in a killable process."""
