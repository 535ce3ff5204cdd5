"""The LLM judge: an HTTP endpoint that speaks OpenAI's chat completions."""
