"""Files that are whole and durable, and files that hold secrets."""
