"""Measure a program: how long it was runnable while others had its core, and its resident memory."""

import contextlib
import os
from collections.abc import Iterator

_NANOSECONDS = 1_000_000_000


def waited_s(watched: int) -> float:
    """The longest wait of a thread minus its other threads' running time, since all share one core; 0 if not counted."""
    threads = list(_threads(watched))
    ran_ns = sum(ran for ran, _ in threads)
    return max((waited - (ran_ns - ran) for ran, waited in threads), default=0) / _NANOSECONDS if threads else 0.0


def resident_bytes(watched: int) -> int:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{_number(watched)}/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _threads(watched: int) -> Iterator[tuple[int, int]]:
    """Yield each live thread's running and waiting nanoseconds (sched-stats.rst)."""
    with contextlib.suppress(OSError, ValueError):
        folder = f"/proc/{_number(watched)}/task"
        for thread in os.listdir(folder):  # noqa: PTH208 (pathlib is not loaded in every child)
            with contextlib.suppress(OSError, ValueError), open(f"{folder}/{thread}/schedstat") as file:  # noqa: PTH123
                ran, waited, _ = map(int, file.read().split())
                yield ran, waited


def _number(watched: int) -> int:
    """The pid in /proc, whose namespace may differ from ours."""
    with open(f"/proc/self/fdinfo/{watched}") as file:  # noqa: PTH123
        fields = dict(line.split(":", 1) for line in file)
    number = int(fields.get("Pid", "-1"))
    if number <= 0:
        raise ValueError("the process is not in this /proc")
    return number
