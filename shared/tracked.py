"""What trackers had not received when a run's tracking service ended, in ``<run folder>/tracking/undelivered.json``."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.shared.files.durable import write_whole


def _file(run_folder: Path) -> Path:
    return run_folder / "tracking" / "undelivered.json"


def forget_undelivered(run_folder: Path) -> None:
    """Remove the file: the service has started again."""
    _file(run_folder).unlink(missing_ok=True)


def write_undelivered(run_folder: Path, why: Mapping[str, str]) -> None:
    """Write why a sink has not received all records, by its name; raises OSError."""
    _file(run_folder).parent.mkdir(parents=True, exist_ok=True)
    write_whole(_file(run_folder), json.dumps(dict(why)))


def read_undelivered(run_folder: Path, sinks: Sequence[str]) -> dict[str, str]:
    """Return what was written for ``sinks``; all of them, if their service did not end in order."""
    if not sinks:
        return {}
    try:
        why = json.loads(_file(run_folder).read_text(encoding="utf-8"))
        return {f"records in {name}": str(why[name]) for name in sinks if name in why}
    except (OSError, ValueError, TypeError):
        return {f"records in {name}": "its service did not end in order; see the log of tracking-0" for name in sinks}
