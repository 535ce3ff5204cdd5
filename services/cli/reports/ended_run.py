"""What commands show of a run without a coordinator: its folder's records."""

import dataclasses
import itertools
import json
from pathlib import Path

from penstock.services.cli import tables
from penstock.services.client.views import EventView
from penstock.services.up.display import console, summary, view

_EVENTS = 5


@dataclasses.dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that has ended, with a summary."""

    folder: Path

    def show_status(self, *, as_json: bool) -> None:
        """Print the summary and the newest events."""
        if as_json:
            console.say((self.folder / "summary.json").read_text(encoding="utf-8"))
            return
        console.say(
            f"{self.folder} has no coordinator; its records say:\n\n{summary.text(self.folder, resumable=False)}\n"
        )
        for event in self._newest(_EVENTS)[::-1]:
            console.say(view.event_line(EventView.model_validate(event)))

    def show_events(self, most: int, *, as_json: bool) -> None:
        """Print the newest events, newest first."""
        tables.show("events", self._newest(most), as_json=as_json)

    def _newest(self, most: int) -> list[dict[str, object]]:
        file = self.folder / "events.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        return [json.loads(line) for line in itertools.islice(reversed(lines), most) if line.endswith("}")]
