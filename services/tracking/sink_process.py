"""The process of one sink: ``python -m penstock.services.tracking.sink_process NAME PARENT``.

::

    standard input   {"run": {…}} once, then {"points": […], "state": {…}} for each batch, and {"close": true}
    standard output  {"state": {…}} or {"error": "…"} for each line
"""

import json
import sys
from pathlib import Path
from typing import Any

from penstock.services.tracking.sinks.sink import Sink, TrackedRun, open_sink
from penstock.shared.process.parent import confine, take_standard_streams

_LONGEST_ERROR = 500


def serve(name: str) -> None:
    """Answer until standard input ends."""
    questions, output = take_standard_streams()
    sink: Sink | None = None
    for line in questions:
        try:
            sink, answer = _answered(name, sink, json.loads(line))
        except BaseException as error:  # noqa: BLE001 (the edge: whatever the tracker's library raises)
            answer = {"error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]}
        print(json.dumps(answer), file=output, flush=True)


def _answered(name: str, sink: Sink | None, question: dict[str, Any]) -> tuple[Sink, dict[str, Any]]:
    if sink is None:
        run = question["run"]
        return open_sink(name, TrackedRun(**{**run, "folder": Path(run["folder"])})), {"state": {}}
    if "close" in question:
        sink.close()
        return sink, {"state": {}}
    return sink, {"state": sink.write(question["points"], question["state"])}


if __name__ == "__main__":
    confine(int(sys.argv[2]), None)
    serve(sys.argv[1])
