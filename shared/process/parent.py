"""A process that does not outlive its parent, however the parent died. On Linux; elsewhere this does nothing."""

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None


def die_with(parent: int, number: signal.Signals) -> bool:
    """Let the kernel send this process ``number`` when its parent dies; return False if ``parent`` is gone already.

    Safe between fork and exec.
    """
    if _prctl is None:
        return True
    _prctl(_SET_PARENT_DEATH_SIGNAL, number)
    return os.getppid() == parent
