"""Files that other users may read."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path


def open_to_others(folder: Path) -> list[Path]:
    """Return what other users may read in a folder that is being written, and the folder itself; links are skipped."""
    return [path for path in _paths(folder) if _is_open(path)]


def _paths(folder: Path) -> Iterator[Path]:
    yield folder
    for place, folders, files in os.walk(folder):
        yield from (Path(place, name) for name in (*folders, *files))


def _is_open(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False  # removed or renamed since it was listed
    return not stat.S_ISLNK(status.st_mode) and bool(status.st_mode & 0o077)
