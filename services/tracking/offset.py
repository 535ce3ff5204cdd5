"""The durable state of one sink: what is delivered, and the batch that is being delivered.

A batch is written here before its delivery and removed after it.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from services.tracking.points import Point, Segments
from shared.errors import SettingsError
from shared.files.durable import flush, write_whole


@dataclasses.dataclass(slots=True)
class Offset:
    after: str = "0-0"
    """The last step's entry on the bus."""
    evaluated: list[int] = dataclasses.field(default_factory=list)
    """Versions whose evaluations are in."""
    segments: Segments = dataclasses.field(default_factory=Segments)
    rollouts: str = "0-0"
    """The journal entry of the last line of rollouts.jsonl."""
    report: str = ""
    """Digest of the last report.html."""
    pending: list[Point] = dataclasses.field(default_factory=list)
    sink: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The sink's own state after the last batch."""

    @classmethod
    def read(cls, path: Path) -> "Offset":
        if not path.exists():
            return cls()
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**fields, "segments": Segments(**fields["segments"])})
        except (ValueError, TypeError, KeyError) as error:
            raise SettingsError(
                f"expected the tracker's offset in {path}, found another file ({error}): remove it to copy the run again"
            ) from error

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(dataclasses.asdict(self)))
        flush(path)
