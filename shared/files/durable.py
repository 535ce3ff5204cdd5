"""Atomic and durable files; full disks."""

import asyncio
import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LEAST_BYTES = 4 * 2**20
"""Less counts as full."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_AGAIN_S = 1.0


def write_whole(path: Path, text: str, mode: int | None = None) -> None:
    """Write a file atomically; it survives the process, not the machine (:func:`flush`). ``mode`` defaults to the
    umask's. Raises OSError: it cannot be written; the old file stays.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        if mode is not None:
            beside.chmod(mode)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} if it has none or cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces ``folder`` if the block succeeds."""
    beside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        replace_folder(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def replace_folder(written: Path, folder: Path) -> None:
    """Replace ``folder`` by ``written``; the name survives the machine, its contents need :func:`flush`."""
    if folder.exists():
        replaced = folder.with_name(f".{folder.name}.old.tmp")
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
        shutil.rmtree(replaced, ignore_errors=True)
    written.rename(folder)
    flush(folder.parent)


class UpdatedFile:
    """A regularly updated file; if the disk is full, writes are retried each second. ``path``: the file. ``tell``:
    reports when it cannot be written, and when it can again.
    """

    def __init__(self, path: Path, tell: Callable[[str], None], mode: int | None = None) -> None:
        self._path = path
        self._mode = mode
        self._tell = tell
        self._waiting: str | None = None

    def write(self, text: str) -> None:
        try:
            write_whole(self._path, text, self._mode)
        except OSError as error:
            if self._waiting is None:
                self._tell(no_room(self._path, error))
            self._waiting = text
        else:
            if self._waiting is not None:
                self._tell(f"{self._path.name} is written again")
            self._waiting = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_AGAIN_S)
            if self._waiting is not None:
                self.write(self._waiting)


def no_room(path: Path, error: OSError) -> str:
    way_out = "free space there" if error.errno in NO_ROOM else "make it writable"
    return (
        f"cannot write {path.name} in {path.parent} ({error.strerror or error}): {way_out}, or move run.folder; "
        "the run retries each second and then continues"
    )


def existing(folder: Path) -> Path:
    """Return ``folder``, or the nearest of its parents that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def free_bytes(folder: Path) -> int:
    """Return the user's free space; 0 for a missing folder."""
    try:
        filesystem = os.statvfs(folder)
    except OSError:
        return 0
    return filesystem.f_bavail * filesystem.f_frsize


def usable_bytes(folder: Path) -> int:
    """Return the free space without what the run's records need."""
    return max(0, free_bytes(folder) - LEAST_BYTES)


def no_space(folder: Path) -> str:
    """Return the sentence that the disk of ``folder``, which may not exist yet, is full, or ""."""
    return "" if free_bytes(existing(folder)) >= LEAST_BYTES else f"no space left on the disk of {folder}"


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
