"""Run records: JSON Lines, summary, ``report.html``."""
