"""What an engine's process schedules and sends."""
