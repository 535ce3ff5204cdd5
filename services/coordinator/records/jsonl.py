"""Append-only JSON Lines files; opening one cuts off a torn last line."""

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from shared.bus.messages import Json

_BLOCK_BYTES = 1 << 16
Entry = tuple[int, int]
"""A stream's entry: milliseconds and number."""
_ENTRY = re.compile(rb'[{ ]"entry": "([0-9]+)-([0-9]+)"')


class Lines:
    """One JSON Lines file.

    >>> lines = Lines(Path("metrics.jsonl"))          # doctest: +SKIP
    >>> lines.last                                    # doctest: +SKIP
    {'entry': '17-0', 'step': 3}
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last = _mend(path)

    def append(self, lines: Sequence[dict[str, Json]]) -> None:
        """Raises OSError: the file is unchanged."""
        if not lines:
            return
        text = "".join(f"{json.dumps(finite(line), ensure_ascii=False)}\n" for line in lines)
        with self._path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                _write_all(file, text.encode("utf-8", "replace"))
            except OSError:
                file.truncate(end)
                raise
        self.last = lines[-1]

    def read(self) -> Iterator[dict[str, Json]]:
        """Yield every line, oldest first."""
        return read(self._path)


def read(path: Path) -> Iterator[dict[str, Json]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if (record := _parse(line)) is not None:
                yield record


def newest_first(path: Path, before: Entry | None = None) -> Iterator[dict[str, Json]]:
    """Yield a file's complete lines, newest first, reading lazily: those before an entry, which is searched for."""
    if not path.exists():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        at, rest = size if before is None else _end_before(file, size, before), b""
        while at > 0:
            size = min(_BLOCK_BYTES, at)
            at -= size
            file.seek(at)
            first, *whole = (file.read(size) + rest).splitlines(keepends=True)
            yield from (record for line in reversed(whole) if (record := _parse(line)) is not None)
            rest = first
        if (record := _parse(rest)) is not None:
            yield record


def _end_before(file: BinaryIO, size: int, before: Entry) -> int:
    """Return where the lines of entries before ``before`` end; entries grow with the file."""
    low, high = 0, size  # the answer is the start of a line from `low` to `high`
    while low < high:
        middle = (low + high) // 2
        start = _line_start(file, middle)
        file.seek(start)
        line = file.readline()
        entry = _entry_of(line)
        if entry is None or entry >= before:
            high = start
        else:
            low = start + len(line)
    return low


def _line_start(file: BinaryIO, at: int) -> int:
    """Return the start of the line that byte ``at`` belongs to."""
    while at > 0:
        start = max(0, at - _BLOCK_BYTES)
        file.seek(start)
        end = file.read(at - start).rfind(b"\n")
        if end >= 0:
            return start + end + 1
        at = start
    return 0


def _entry_of(line: bytes) -> Entry | None:
    match = _ENTRY.match(line) or _ENTRY.search(line)  # first, in our own lines
    return None if match is None else (int(match[1]), int(match[2]))


def _write_all(file: BinaryIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def _mend(path: Path) -> dict[str, Json] | None:
    """Cut off what follows the last whole record; return that."""
    if not path.exists():
        return None
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = _line_start(file, end - 1)
            file.seek(start)
            if (record := _parse(file.read(end - start))) is not None:
                break
            end = start
        file.truncate(end)
    return record if end else None


def _parse(line: bytes) -> dict[str, Json] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def finite(value: Json) -> Json:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value
