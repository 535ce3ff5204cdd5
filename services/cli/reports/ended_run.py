"""What commands show of a run without a coordinator: its folder's records."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from penstock.services.cli.cluster.deployment import end_later
from penstock.services.client.coordinator import page_link
from penstock.services.client.views import EventView
from penstock.services.up.display import console, summary, view
from penstock.shared.errors import PenstockError

_EVENTS = 5


@dataclasses.dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that has ended, with a summary."""

    folder: Path

    def show_status(self) -> None:
        """Print the summary and the newest events."""
        console.say(
            f"{self.folder} has no coordinator; its records say:\n\n{summary.text(self.folder, resumable=False)}\n"
        )
        file = self.folder / "events.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        for line in lines[-_EVENTS:]:
            if line.endswith("}"):
                console.say(view.event_line(EventView.model_validate_json(line)))

    def show_page(self, print_link: Callable[[str], None]) -> None:
        """Print a link to its page, and serve it until Ctrl-C."""
        process, url, token = self._serve()
        print_link(page_link(url, token))
        console.warn("Ctrl-C ends the page")
        process.wait()

    def serve(self) -> tuple[str, str]:
        """Return URL and token of its records' API, which is served until the command ends. Raises PenstockError."""
        return self._serve()[1:]

    def _serve(self) -> tuple[subprocess.Popen[str], str, str]:
        words = [sys.executable, "-m", "penstock.services.coordinator.page", str(self.folder)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        end_later(process)
        assert process.stdout is not None
        said = json.loads(process.stdout.readline() or '{"error": "its records cannot be served"}')
        if "error" in said:
            raise PenstockError(said["error"])
        return process, said["url"], said["token"]
