"""The LLM judge."""
