"""vLLM engines that span hosts."""
