"""Commands that read a run's files or its bus and print what they found: they change nothing."""
