"""Child processes by their command line."""

import contextlib
from collections.abc import Iterator

import psutil


def children(word: str, parent: int | None = None, *, recursive: bool = False) -> list[psutil.Process]:
    """Return the children of ``parent`` (this process) whose command line has ``word`` as one of its words; no zombies."""
    return [child for child in _children(parent, recursive) if word in _words(child)]


def _children(parent: int | None, recursive: bool) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        yield from psutil.Process(parent).children(recursive)


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        words: list[str] = process.cmdline()
        return words
    return []
