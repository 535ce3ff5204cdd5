"""Weight updates."""
