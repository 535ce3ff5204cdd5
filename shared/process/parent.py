"""What ties a process to its parent: its end (Linux; elsewhere without effect) and its environment."""

import ctypes
import os
import signal
import sys

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
