"""TensorBoard: one event file for each segment, in ``<run folder>/tensorboard/<run>``.

The state is the length of each file after the last batch; what is behind it was being written when the process died,
and is cut off.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from services.tracking.points import Point
from services.tracking.sinks.sink import TrackedRun

_FILE = "events.out.tfevents.0.penstock"


class TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        self._run = run

    def write(self, points: Sequence[Point], state: Mapping[str, Any]) -> dict[str, Any]:
        lengths = {str(segment): int(length) for segment, length in state.items()}
        for segment in dict.fromkeys(int(point["segment"]) for point in points):
            events = [_event(point) for point in points if point["segment"] == segment]
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
    return Event(wall_time=point["at_s"], step=point["step"], summary=Summary(value=values))


def open_sink(run: TrackedRun) -> TensorBoard:
    return TensorBoard(run)
