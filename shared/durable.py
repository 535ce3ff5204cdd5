"""Make what was written to disk survive the machine."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Return once the file or folder at ``path`` is on disk; of a folder its list of names, not what lies in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
