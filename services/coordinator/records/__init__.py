"""Run records: JSON lines in the run's folder, its summary, and ``report.html``."""
