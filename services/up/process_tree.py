"""System calls that end children with their parent and adopt orphans.

On Linux, children are signalled at their parent's death and orphans (such as trainer ranks) come to this process.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection

import psutil

from penstock.shared.process.parent import die_with

_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None


def dies_with_parent() -> Callable[[], None] | None:
    """SIGTERM when this process dies."""
    if _prctl is None:
        return None
    parent = os.getpid()

    def ask() -> None:
        if not die_with(parent, signal.SIGTERM):
            os._exit(1)

    return ask


def inherit_orphans() -> None:
    if _prctl is not None:
        _prctl(_SET_CHILD_SUBREAPER, 1)


def end_orphans(ours: Collection[int]) -> int:
    """Kill and reap children not in ``ours``; return the count."""
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


def started_at_s(pid: int) -> float | None:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def memory_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def is_alive(pid: int) -> bool:
    """Return whether the process runs; zombies do not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
