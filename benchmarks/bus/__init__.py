"""The bus, its messages, and the coordinator on it."""
