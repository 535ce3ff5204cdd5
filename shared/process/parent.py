"""What ties a process to its parent: its end (Linux; elsewhere without effect), its environment and its streams."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from typing import BinaryIO, TextIO

FOR_PYTHON = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "LC_ALL", "TMPDIR")
"""The environment of processes with untrusted code or text: no credentials or settings."""
_SET_PARENT_DEATH_SIGNAL = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None


def die_with(parent: int, number: signal.Signals) -> bool:
    """Make the kernel send ``number`` when the parent dies; False if it is already gone. Safe between fork and exec."""
    if _prctl is None:
        return True
    _prctl(_SET_PARENT_DEATH_SIGNAL, number)
    return os.getppid() == parent


def confine(parent: int, memory_bytes: int | None) -> None:
    """Die with the parent, ignore Ctrl-C, and limit memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if not die_with(parent, signal.SIGKILL):
        sys.exit(0)


def take_standard_streams() -> tuple[BinaryIO, TextIO]:
    """Return standard input and output. From then on libraries read nothing, and print to standard error, so that they
    cannot forge an answer.
    """
    questions, output = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return questions, output
