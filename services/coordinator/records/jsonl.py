"""Append-only JSON Lines files; opening one cuts off a torn last line.

Several coordinators may write a folder's files, one of which may wake after any time with lines that the other has
written. So a file is opened and appended to under :func:`exclusive`, and only as it was left by the same object. Readers
drop lines that a file has twice, as files of older versions may.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from penstock.shared.bus.messages import Json

_BLOCK_BYTES = 1 << 16
Entry = tuple[int, int]
"""A stream's entry: milliseconds and number."""
_ENTRY = re.compile(rb'[{ ]"entry": "([0-9]+)-([0-9]+)"')
_STEP = re.compile(rb'[{ ]"step": ([0-9]{1,18})')
_NEWEST_LINES = 1000
"""Among which the newest entry is: a coordinator that wakes late has at most one batch in hand."""
_LOCK_FILE = "records.lock"
_LOCK_TRIES, _TRY_S = 40, 0.005
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Overtaken(OSError):
    """Another coordinator has written, or leads."""


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a folder's records. Raises OSError: another process holds them."""
    file = folder / _LOCK_FILE
    with file.open("ab") as lock:
        for attempt in range(_LOCK_TRIES):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt + 1 == _LOCK_TRIES:
                    why = "another coordinator holds it: if that one is frozen, end it"
                    raise OSError(errno.EBUSY, why, str(file)) from None
                time.sleep(_TRY_S)
            except OSError as error:  # a file system without locks: one that has frozen may repeat lines
                if error.errno not in _NO_LOCKS:
                    raise
                break
        yield


class Lines:
    """One JSON Lines file.

    >>> lines = Lines(Path("metrics.jsonl"))          # doctest: +SKIP
    >>> lines.last                                    # doctest: +SKIP
    {'entry': '17-0', 'step': 3}

    Both need :func:`exclusive` where others may write it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last = _mend(path)
        self._left = state_of(path)

    def append(self, lines: Sequence[dict[str, Json]]) -> None:
        """Raises OSError: the file is unchanged; Overtaken: another has changed it, so open it again."""
        if not lines:
            return
        if state_of(self._path) != self._left:
            raise Overtaken(errno.ESTALE, "another process has changed it", str(self._path))
        text = "".join(f"{json.dumps(finite(line), ensure_ascii=False)}\n" for line in lines)
        with self._path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                _write_all(file, text.encode("utf-8", "replace"))
            except OSError:
                file.truncate(end)
                raise
        self.last, self._left = lines[-1], state_of(self._path)

    def read(self) -> Iterator[dict[str, Json]]:
        return read(self._path)


def read(path: Path) -> Iterator[dict[str, Json]]:
    """Yield a file's complete lines, oldest first, each once."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from _once(record for line in file if (record := _parse(line)) is not None)


def _once(lines: Iterable[dict[str, Json]]) -> Iterator[dict[str, Json]]:
    """Drop a line whose entry is not above all before it, and, of lines without one, a version's set that was there."""
    newest, evaluated = (0, 0), set[tuple[Json, Json]]()
    for line in lines:
        entry, evaluation = place(line), (line.get("version"), line.get("set"))
        if entry > (0, 0):
            if entry <= newest:
                continue
            newest = entry
        elif isinstance(evaluation[0], int) and isinstance(evaluation[1], str):
            if evaluation in evaluated:
                continue
            evaluated.add(evaluation)
        yield line


def place(line: Mapping[str, Json]) -> Entry:
    """Return a line's entry, (0, 0) without one."""
    entry = line.get("entry")
    if not isinstance(entry, str) or (parts := re.fullmatch("([0-9]{1,19})-([0-9]{1,19})", entry)) is None:
        return (0, 0)
    return int(parts[1]), int(parts[2])


class BoundedLines(Lines):
    """A file, for one writer, that is thinned out above ``most_bytes``: ``keep`` returns which lines stay."""

    def __init__(self, path: Path, most_bytes: int, keep: Callable[[Path], Iterable[dict[str, Json]]]) -> None:
        super().__init__(path)
        self._most_bytes, self._keep = most_bytes, keep

    def append(self, lines: Sequence[dict[str, Json]]) -> None:
        """Append lines; thin the file out if it has become too large. May raise OSError."""
        super().append(lines)
        if lines and self._path.stat().st_size > self._most_bytes:
            beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            try:
                with beside.open("w", encoding="utf-8", errors="replace") as file:
                    for line in self._keep(self._path):
                        file.write(f"{json.dumps(finite(line), ensure_ascii=False)}\n")
                beside.replace(self._path)
            finally:
                beside.unlink(missing_ok=True)
            self._left = state_of(self._path)


def every_second(path: Path) -> Iterator[dict[str, Json]]:
    """Yield every second line of a file, the newest included."""
    odd = sum(1 for _ in read(path)) % 2 == 0
    yield from itertools.islice(read(path), int(odd), None, 2)


class Tail:
    """A reader that continues where it stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] = (0, 0)
        """Inode, and the end of the last line that was read."""
        self.is_whole = True
        """Whether the last call read all lines."""

    def is_replaced(self) -> bool:
        """Whether another file is there now; it is read from its start."""
        inode, size = state_of(self._path) or (0, 0)
        if replaced := self._file[1] > 0 and (inode != self._file[0] or size < self._file[1]):
            self._file = (0, 0)
        return replaced

    def read(self, most: int) -> Iterator[tuple[int, dict[str, Json]]]:
        """Yield up to ``most`` new lines with their offset."""
        self.is_whole = True
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            inode, offset = os.fstat(file.fileno()).st_ino, file.seek(self._file[1])
            for line in itertools.islice(file, most):
                if (record := _parse(line)) is not None:  # what follows the last record may be cut off
                    self._file = (inode, offset + len(line))
                    yield offset, record
                offset += len(line)
            self.is_whole = not file.readline()

    def at(self, offsets: Iterable[int]) -> Iterator[dict[str, Json]]:
        """Yield the lines at these offsets."""
        offsets = iter(offsets)
        if (first := next(offsets, None)) is None:
            return
        with self._path.open("rb") as file:
            for offset in itertools.chain([first], offsets):
                file.seek(offset)
                yield _parse(file.readline()) or {}


def newest_first(path: Path, before: Entry | None = None) -> Iterator[dict[str, Json]]:
    """Yield a file's complete lines, newest first, reading lazily: those before an entry, which is searched for."""
    if not path.exists():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        at, rest = size if before is None else _end_of(file, size, _entry_of, before), b""
        while at > 0:
            size = min(_BLOCK_BYTES, at)
            at -= size
            file.seek(at)
            first, *whole = (file.read(size) + rest).splitlines(keepends=True)
            yield from (record for line in reversed(whole) if (record := _parse(line)) is not None)
            rest = first
        if (record := _parse(rest)) is not None:
            yield record


def newest_up_to(path: Path, step: int) -> Entry | None:
    """Return the entry of the newest line whose step is at most ``step``; steps grow with the file, save for rollbacks."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        end = _end_of(file, file.seek(0, os.SEEK_END), _step_of, (step + 1,))
        if end == 0:
            return None
        file.seek(_line_start(file, end - 1))
        return _entry_of(file.readline())


def _end_of(file: BinaryIO, size: int, key: Callable[[bytes], tuple[int, ...] | None], bound: tuple[int, ...]) -> int:
    """Return where the lines with a key below ``bound`` end; keys grow with the file."""
    low, high = 0, size  # the answer is the start of a line from `low` to `high`
    while low < high:
        middle = (low + high) // 2
        start = _line_start(file, middle)
        file.seek(start)
        line = file.readline()
        place = key(line)
        if place is None or place >= bound:
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


def _step_of(line: bytes) -> tuple[int, ...] | None:
    match = _STEP.search(line)  # before all texts, in our own lines
    return None if match is None else (int(match[1]),)


def _write_all(file: BinaryIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def _mend(path: Path) -> dict[str, Json] | None:
    """Cut off what follows the last whole record; return the newest one."""
    if not path.exists():
        return None
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = _line_start(file, end - 1)
            file.seek(start)
            if _parse(file.read(end - start)) is not None:
                break
            end = start
        file.truncate(end)
    return max(itertools.islice(newest_first(path), _NEWEST_LINES), key=place, default=None)


def state_of(path: Path) -> tuple[int, int] | None:
    """Return what every change of a file changes; None: nothing is in it."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return (state.st_ino, state.st_size) if state.st_size else None


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
