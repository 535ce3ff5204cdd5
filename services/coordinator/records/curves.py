"""metrics.jsonl as curves of any length: buckets that keep minimum, maximum and last value of each metric.

::

    metrics.jsonl   1 2 3 4 … 16 | 17 … 32 | … | 9,985 … 10,000      a chunk is 16 steps, read once and kept as three numbers
    range > 4,096 steps           chunks are joined to at most `points` buckets
    range ≤ 4,096 steps           its lines are read again, and joined to at most `points` buckets

Beyond 8,192 chunks two become one, so that memory is bounded. A step that was made again replaces those from it on.
"""

import bisect
import collections
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.services.coordinator.records.jsonl import Entry, Tail, place
from penstock.shared.bus.messages import Json

_CHUNK, _MOST_CHUNKS, _MOST_LINES = 16, 8192, 4096
_READ_LINES = 10_000
"""That one call reads at most."""
_MARKS = 400
_ABOUT = frozenset({"entry", "step", "version", "finished_at_s", "lag_counts"})
_MARKED = {"settings changed": "settings", "run restored": "restart", "bus lost steps": "restart"}
"""Kinds of events that have a step."""
_NAN = math.nan
Bucket = tuple[float, float, float]
"""Minimum, maximum and last value."""


class Curves:
    """A folder's metrics. It belongs to one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._metrics, self._events = Tail(folder / "metrics.jsonl"), Tail(folder / "events.jsonl")
        self._forget()

    def _forget(self) -> None:
        self._steps, self._offsets = array("q"), array("q")
        self._size, self._chunks = _CHUNK, 0
        self._columns: dict[str, tuple[array[float], array[float], array[float]]] = {}
        self._rest: list[dict[str, float]] = []
        """Steps after the last whole chunk."""
        self._newest: Entry = (0, 0)
        self._marks: collections.deque[dict[str, Any]] = collections.deque(maxlen=_MARKS)
        self._marked: collections.deque[dict[str, Any]] = collections.deque(maxlen=_MARKS)

    # ---------------------------------------------------------------- read

    def catch_up(self, most: int = _READ_LINES) -> bool:
        """Read up to ``most`` new lines; return whether all are read. May raise OSError."""
        if self._metrics.is_replaced():
            self._forget()
        for offset, line in self._metrics.read(most):
            self._add(offset, line)
        if self._events.is_replaced():
            self._marked.clear()
        for _, event in self._events.read(most):
            fields, kind = event.get("fields"), _MARKED.get(str(event.get("name")))
            if kind and isinstance(fields, dict) and isinstance(step := fields.get("step"), int):
                self._marked.append({"step": step, "kind": kind, "text": f"{event['name']}: {event.get('detail', '')}"})
        return self._metrics.is_whole and self._events.is_whole

    def _add(self, offset: int, line: Mapping[str, Json]) -> None:
        step, entry = line.get("step"), place(line)
        if not isinstance(step, int) or (0, 0) < entry <= self._newest:
            return
        self._newest = max(entry, self._newest)
        if self._steps and step <= self._steps[-1]:
            text = f"steps from {step:,} were made again; they had reached {self._steps[-1]:,}"
            self._marks.append({"step": step, "kind": "rollback", "text": text})
            self._rewind(bisect.bisect_left(self._steps, step))
        self._steps.append(step)
        self._offsets.append(offset)
        self._rest.append(_values(line))
        if len(self._rest) == self._size:
            self._close()

    def _close(self) -> None:
        for name in {name for row in self._rest for name in row}:
            columns = self._columns.setdefault(name, (array("d"), array("d"), array("d")))
            bucket = _of_values([row[name] for row in self._rest if name in row])
            for column, value in zip(columns, bucket, strict=True):
                column.extend([_NAN] * (self._chunks - len(column)))
                column.append(value)
        self._chunks, self._rest = self._chunks + 1, []
        if self._chunks == _MOST_CHUNKS:
            for name, columns in self._columns.items():
                joined = [_joined(columns, index, index + 2) for index in range(0, self._chunks, 2)]
                self._columns[name] = (
                    array("d", [low for low, _, _ in joined]),
                    array("d", [high for _, high, _ in joined]),
                    array("d", [last for _, _, last in joined]),
                )
            self._size, self._chunks = self._size * 2, self._chunks // 2

    def _rewind(self, count: int) -> None:
        """Keep the first ``count`` steps."""
        del self._steps[count:], self._offsets[count:]
        whole = min(self._chunks, count // self._size)
        if whole < self._chunks:
            for columns in self._columns.values():
                for column in columns:
                    del column[whole:]
            self._chunks = whole
            self._rest = [_values(line) for line in self.lines(whole * self._size)]
        else:
            del self._rest[count - whole * self._size :]

    def lines(self, first: int = 0, end: int | None = None) -> Iterator[dict[str, Json]]:
        """Yield one line for each step, by index."""
        yield from self._metrics.at(self._offsets[first:end])

    # ---------------------------------------------------------------- answer

    def view(self, points: int, first: int | None = None, last: int | None = None) -> dict[str, Any]:
        """Return the curves from step ``first`` to ``last`` (None: the ends) in at most ``points`` buckets; see CurvesView."""
        steps = self._steps
        low = 0 if first is None else bisect.bisect_left(steps, first)
        high = len(steps) if last is None else bisect.bisect_right(steps, last)
        if high - low <= _MOST_LINES:
            rows = [_values(line) for line in self.lines(low, high)]
            width, ends, metrics = _by_rows(rows, points)
            ends = [low + end for end in ends]
        else:
            low -= low % self._size
            width, ends, metrics = self._by_chunks(low, high, points)
        shown = steps[low:high]
        bounds = (shown[0], shown[-1]) if shown else (0, 0)
        return {
            "first_step": steps[0] if steps else 0,
            "last_step": steps[-1] if steps else 0,
            "steps": len(steps),
            "width": width,
            "step": [steps[end - 1] for end in ends],
            "metrics": metrics,
            "marks": [mark for mark in (*self._marks, *self._marked) if bounds[0] <= mark["step"] <= bounds[1]],
        }

    def _by_chunks(self, low: int, high: int, points: int) -> tuple[int, list[int], dict[str, Any]]:
        first, last = low // self._size, min(self._chunks, -(-high // self._size))
        each = max(1, -(-(last - first) // (points - 1)))
        groups = [(start, min(start + each, last)) for start in range(first, last, each)]
        ends = [end * self._size for _, end in groups]
        rest = self._rest if high > self._chunks * self._size else []
        names = sorted({*self._columns, *(name for row in rest for name in row)})
        if rest:
            ends.append(high)
        metrics = {}
        for name in names:
            columns = self._columns.get(name)
            buckets = [(_NAN,) * 3 if columns is None else _joined(columns, start, end) for start, end in groups]
            if rest:
                buckets.append(_of_values([row[name] for row in rest if name in row]))
            metrics[name] = _series(buckets, has_range=True)
        return each * self._size, ends, metrics


def _by_rows(rows: Sequence[Mapping[str, float]], points: int) -> tuple[int, list[int], dict[str, Any]]:
    width = max(1, -(-len(rows) // points))
    starts = range(0, len(rows), width)
    metrics = {}
    for name in sorted({name for row in rows for name in row}):
        buckets = [_of_values([row[name] for row in rows[start : start + width] if name in row]) for start in starts]
        metrics[name] = _series(buckets, has_range=width > 1)
    return width, [min(start + width, len(rows)) for start in starts], metrics


def _series(buckets: Sequence[Bucket | tuple[float, ...]], *, has_range: bool) -> dict[str, list[float | None] | None]:
    low, high, last = ([_short(bucket[side]) for bucket in buckets] for side in range(3))
    return {"last": last, "low": low if has_range else None, "high": high if has_range else None}


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _of_values(values: Sequence[float]) -> Bucket:
    return (min(values), max(values), values[-1]) if values else (_NAN, _NAN, _NAN)


def _joined(columns: Sequence[Sequence[float]], start: int, end: int) -> Bucket:
    low, high, last = ([value for value in column[start:end] if value == value] for column in columns)
    return (min(low), max(high), last[-1]) if last else (_NAN, _NAN, _NAN)


def _values(line: Mapping[str, Json]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in line.items()
        if isinstance(value, (int, float)) and name not in _ABOUT and math.isfinite(value)
    }
