"""The system calls that keep a machine clean: what dies with its parent, and who inherits orphans.

On Linux a child is told when its parent dies, however that died, and an orphan of a child (a trainer's rank, say) comes to
this process, which ends it. Elsewhere both are left out and an orderly stop does the work alone.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection

import psutil

from shared.process.parent import die_with

_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None


def dies_with_parent() -> Callable[[], None] | None:
    """Return what a child calls between fork and exec, so that SIGTERM reaches it when this process is gone."""
    if _prctl is None:
        return None
    parent = os.getpid()

    def ask() -> None:
        if not die_with(parent, signal.SIGTERM):
            os._exit(1)

    return ask


def inherit_orphans() -> None:
    """Become the parent of whatever a child leaves behind."""
    if _prctl is not None:
        _prctl(_SET_CHILD_SUBREAPER, 1)


def end_orphans(ours: Collection[int]) -> int:
    """Kill and reap every child of this process whose pid is not in ``ours``; return how many."""
    ended = 0
    for child in psutil.Process().children():
        if child.pid in ours:
            continue
        ended += 1
        for process in (*_below(child), child):
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(psutil.Error):
            child.wait(2.0)
    return ended


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.Error:
        return []


def kill_group(pid: int) -> None:
    """SIGKILL every process of the group that ``pid`` leads; a group that is gone is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def started_at_s(pid: int) -> float | None:
    """Return when the process started, Unix seconds; None when there is no such process."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def memory_bytes(pid: int) -> int:
    """Return the resident memory of one process; 0 when it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
