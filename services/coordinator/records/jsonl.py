"""Append-only JSON Lines files; opening one cuts off a torn last line."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from shared.bus.messages import Json

_BLOCK_BYTES = 1 << 16


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


def newest_first(path: Path) -> Iterator[dict[str, Json]]:
    """Yield a file's complete lines, newest first, reading lazily."""
    if not path.exists():
        return
    with path.open("rb") as file:
        at, rest = file.seek(0, os.SEEK_END), b""
        while at > 0:
            size = min(_BLOCK_BYTES, at)
            at -= size
            file.seek(at)
            first, *whole = (file.read(size) + rest).splitlines(keepends=True)
            yield from (record for line in reversed(whole) if (record := _parse(line)) is not None)
            rest = first
        if (record := _parse(rest)) is not None:
            yield record


def _write_all(file: BinaryIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def _mend(path: Path) -> dict[str, Json] | None:
    last, whole = None, 0
    if not path.exists():
        return None
    with path.open("r+b") as file:
        for line in file:
            if (record := _parse(line)) is None:
                break
            last, whole = record, whole + len(line)
        file.truncate(whole)
    return last


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
