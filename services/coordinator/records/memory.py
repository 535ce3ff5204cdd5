"""memory.jsonl: the memory timeline, one line a report of a process. Its size is bounded.

Above ``_MOST_BYTES`` two neighbouring reports of a process become one, which keeps the larger sample of each phase, so
that a long run loses detail and no peak. If that is not enough, the oldest reports leave.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.services.coordinator.records.jsonl import BoundedLines, read
from penstock.shared.bus.messages import Json, MemoryReport

MEMORY_FILE = "memory.jsonl"
_MOST_BYTES = 16 << 20


def memory_lines(path: Path, most_bytes: int = _MOST_BYTES) -> BoundedLines:
    def keep(path: Path) -> list[dict[str, Any]]:
        kept = thinned(read(path))
        while len(kept) > 1 and 4 * sum(len(json.dumps(line)) for line in kept) > 3 * most_bytes:
            del kept[: len(kept) // 2]  # of too many processes to become smaller otherwise
        return kept

    return BoundedLines(path, most_bytes, keep)


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
