"""The run's report, report.html. A placeholder: the page itself is built beside this."""

from pathlib import Path


def write_report(run_folder: Path) -> Path:
    """Write <run folder>/report.html and return its path."""
    path = run_folder / "report.html"
    path.write_text("<!doctype html><title>Penstock</title>\n", encoding="utf-8")
    return path
