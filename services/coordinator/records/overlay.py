"""overlay.html: the curves of several runs over one another in one offline file, as ``report`` writes one of a run."""

from collections.abc import Sequence
from pathlib import Path

from penstock.services.coordinator.records.curves import Curves
from penstock.services.coordinator.records.jsonl import read
from penstock.services.coordinator.records.report import document
from penstock.shared.bus.messages import Json
from penstock.shared.files.durable import write_whole

_SCRIPTS = ("dom.js", "charts.js", "values.js", "cursor.js", "overlay.js")
_POINTS = 240
_BODY = """<main id="main" hidden><div id="head"></div><h2 id="h-curves">Curves</h2>
<div id="curves" class="grid-of" tabindex="0" role="group" aria-labelledby="h-curves"></div></main>"""


def write_overlay(runs: Sequence[tuple[str, Path]], metrics: Sequence[str]) -> Path:
    """Write overlay.html of named ``runs``' ``metrics`` and accuracies into the first one's folder. Raises OSError."""
    path = runs[0][1] / "overlay.html"
    data: dict[str, Json] = {"runs": [_records(name, folder) for name, folder in runs], "metrics": list(metrics)}
    write_whole(path, document(_BODY, _SCRIPTS, data))
    return path


def _records(name: str, folder: Path) -> dict[str, Json]:
    curves = Curves(folder)
    while not curves.catch_up():
        pass
    evaluations: list[Json] = [
        {"set": line.get("set"), "step": line["step"], "accuracy": line.get("accuracy")}
        for line in read(folder / "evaluations.jsonl")
        if isinstance(line.get("step"), int)
    ]
    return {"name": name, "curves": curves.view(_POINTS), "evaluations": evaluations}
