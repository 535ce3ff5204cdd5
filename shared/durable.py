"""Files that are whole: never seen half written, or, where that is asked for, surviving the machine."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file that nobody ever sees half written; it survives the process, not the machine (:func:`flush`)."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def flush(path: Path) -> None:
    """Return once the file or folder at ``path`` is on disk; of a folder its list of names, not what lies in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
