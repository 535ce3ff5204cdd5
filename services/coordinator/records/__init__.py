"""Records of a run for people: JSON lines in the run's folder, its summary, and ``report.html``."""
