"""The sink protocol, and the sinks by name."""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from penstock.services.tracking.points import Point

ROLLOUTS = "rollouts"
"""Name of the tables in trackers."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrackedRun:
    id: str
    project: str
    folder: Path
    """Of this run, for trackers that write files."""
    config: Mapping[str, str]
    """Its settings by key."""

    def segment(self, number: int) -> str:
        return self.id if number == 0 else f"{self.id}-segment-{number}"


class Sink(Protocol):
    """One tracker, in a process of its own."""

    def write(self, points: Sequence[Point], state: Mapping[str, Any]) -> dict[str, Any]:
        """Write points, with their tables and reports, durably and return the new state.

        ``state`` is what the last acknowledged call returned. After a crash the same points come again, and those that
        are already written must not be written twice.
        """
        ...

    def close(self) -> None: ...


def open_sink(name: str, run: TrackedRun) -> Sink:
    module = importlib.import_module(f"penstock.services.tracking.sinks.{name}_sink")
    return cast(Sink, module.open_sink(run))
