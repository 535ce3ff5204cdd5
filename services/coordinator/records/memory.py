"""memory.jsonl: the memory timeline, one line a report of a process. Its size is bounded.

Above ``_MOST_BYTES`` two neighbouring reports of a process become one, which keeps the larger sample of each phase, so
that a long run loses detail and no peak. If that is not enough, the oldest reports leave.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.services.coordinator.records.jsonl import Lines, finite, read, state_of
from penstock.shared.bus.messages import Json, MemoryReport
from penstock.shared.files.durable import write_whole

MEMORY_FILE = "memory.jsonl"
_MOST_BYTES = 16 << 20


class MemoryLines(Lines):
    """The file, for one writer."""

    def __init__(self, path: Path, most_bytes: int = _MOST_BYTES) -> None:
        super().__init__(path)
        self._file, self._most_bytes = path, most_bytes

    def append(self, lines: Sequence[dict[str, Json]]) -> None:
        """Append lines; thin the file out if it has become too large. May raise OSError."""
        super().append(lines)
        if lines and self._file.stat().st_size > self._most_bytes:
            kept = [f"{json.dumps(finite(line), ensure_ascii=False)}\n" for line in thinned(read(self._file))]
            while len(kept) > 1 and 4 * sum(map(len, kept)) > 3 * self._most_bytes:
                del kept[: len(kept) // 2]  # of too many processes to become smaller otherwise
            write_whole(self._file, "".join(kept))
            self._left = state_of(self._file)


def memory_line(entry: str, report: MemoryReport) -> dict[str, Json]:
    return {
        "entry": entry,
        "replica": report.replica,
        "samples": [dataclasses.asdict(sample) for sample in report.samples],
    }


def thinned(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return half of the lines, with each phase's larger sample of two."""
    single: dict[str, dict[str, Any]] = {}
    kept: list[dict[str, Any]] = []
    for line in lines:
        earlier = single.pop(line["replica"], None)
        if earlier is None:
            single[line["replica"]] = line
        else:
            kept.append({**line, "samples": _larger([*earlier["samples"], *line["samples"]])})
    return sorted([*kept, *single.values()], key=lambda line: tuple(map(int, line["entry"].split("-"))))


def _larger(samples: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    largest: dict[tuple[str, str], dict[str, Any]] = {}
    for sample in samples:
        key = (sample["device"], sample["phase"])
        if key not in largest or sample["total_bytes"] >= largest[key]["total_bytes"]:
            largest[key] = sample
    return sorted(largest.values(), key=lambda sample: float(sample["ended_at_s"]))
