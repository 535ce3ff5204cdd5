"""TensorBoard: one event file for each segment, in ``<run folder>/tensorboard/<run>``.

The state is the length of each file after the last batch; what is behind it was being written when the process died,
and is cut off.

TensorBoard shows a rollout table's cells as Markdown or, if its user prefers, as HTML. They are preformatted, with
punctuation as character references, so that both show what the model wrote. There is no place for the report.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from penstock.services.tracking.points import REPORT, TABLE, Point
from penstock.services.tracking.sinks.sink import ROLLOUTS, TrackedRun
from penstock.services.tracking.tables import Table

_MARKUP = re.compile(r"[!-/:-@\[-`{-~]")
_FILE = "events.out.tfevents.0.penstock"


class TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        self._run = run

    def write(self, points: Sequence[Point], state: Mapping[str, Any]) -> dict[str, Any]:
        lengths = {str(segment): int(length) for segment, length in state.items()}
        for segment in dict.fromkeys(int(point["segment"]) for point in points):
            events = [_event(point) for point in points if point["segment"] == segment and REPORT not in point]
            lengths[str(segment)] = _append(self._file(segment), events, lengths.get(str(segment), 0))
        return lengths

    def close(self) -> None:
        """Do nothing."""

    def _file(self, segment: int) -> Path:
        return self._run.folder / "tensorboard" / self._run.segment(segment) / _FILE


def _append(path: Path, events: Sequence[Event], length: int) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        file.truncate(length)
        file.seek(length)
        _write(file, ([] if length else [Event(file_version="brain.Event:2")]) + list(events))
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _write(file: BinaryIO, events: Sequence[Event]) -> None:
    records = RecordWriter(file)
    for event in events:
        records.write(event.SerializeToString())


def _event(point: Point) -> Event:
    values = [Summary.Value(tag=name, simple_value=value) for name, value in point["values"].items()]
    if TABLE in point:
        values.append(_text(point[TABLE]))
    return Event(wall_time=point["at_s"], step=point["step"], summary=Summary(value=values))


def _text(table: Table) -> Summary.Value:
    rows = [table["columns"], *table["rows"]]
    shape = [TensorShapeProto.Dim(size=len(rows)), TensorShapeProto.Dim(size=len(table["columns"]))]
    cells = [_html(cell).encode() for row in rows for cell in row]
    tensor = TensorProto(dtype=DT_STRING, tensor_shape=TensorShapeProto(dim=shape), string_val=cells)
    return Summary.Value(tag=ROLLOUTS, metadata=create_summary_metadata(None, None), tensor=tensor)


def _html(cell: str | float | None) -> str:
    """Return a cell as HTML that has no meaning in Markdown."""
    text = "" if cell is None else str(cell)
    return f"<pre>{_MARKUP.sub(lambda match: f'&#{ord(match[0])};', text)}</pre>"


def open_sink(run: TrackedRun) -> TensorBoard:
    return TensorBoard(run)
