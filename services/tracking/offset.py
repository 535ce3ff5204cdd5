"""The durable state of one sink: what is delivered, and the batch that is being delivered.

A batch is written here before its delivery and removed after it.
"""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field, TypeAdapter

from penstock.services.tracking.points import Point, Segments
from penstock.shared.errors import SettingsError
from penstock.shared.files.durable import flush, write_whole

Entry: TypeAlias = Annotated[str, Field(pattern=r"^[0-9]{1,19}-[0-9]{1,19}$")]


@dataclasses.dataclass(slots=True)
class Offset:
    after: Entry = "0-0"
    """The last step's entry on the bus."""
    evaluated: list[int] = dataclasses.field(default_factory=list)
    """Versions whose evaluations are in."""
    segments: Segments = dataclasses.field(default_factory=Segments)
    rollouts: Entry = "0-0"
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
            return _OFFSET.validate_json(path.read_bytes())
        except ValueError as error:
            raise SettingsError(
                f"expected the tracker's offset in {path}, found another file: remove it to copy the run again"
            ) from error

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(dataclasses.asdict(self)))
        flush(path)


_OFFSET = TypeAdapter(Offset)
