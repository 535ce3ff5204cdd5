"""How long a program could have run while other processes had its core, as the kernel's scheduler counted it.

A deadline that counted this time would be a deadline for the program's neighbours.
"""

import contextlib
import os
from collections.abc import Iterator

_NANOSECONDS = 1_000_000_000


def waited_s(watched: int) -> float:
    """Return the seconds that the process behind pid descriptor ``watched`` waited for its core; 0 where the kernel does not count.

    The longest wait of any of its threads counts, less the time in which its other threads ran: all share one core, and threads
    that wait for one another do not wait for a neighbour.
    """
    threads = list(_threads(watched))
    ran_ns = sum(ran for ran, _ in threads)
    return max((waited - (ran_ns - ran) for ran, waited in threads), default=0) / _NANOSECONDS if threads else 0.0


def _threads(watched: int) -> Iterator[tuple[int, int]]:
    """Give nanoseconds of running and of waiting of each thread that is still there (sched-stats.rst)."""
    with contextlib.suppress(OSError, ValueError):
        folder = f"/proc/{_number(watched)}/task"
        for thread in os.listdir(folder):  # noqa: PTH208 (pathlib is not loaded in every child)
            with contextlib.suppress(OSError, ValueError), open(f"{folder}/{thread}/schedstat") as file:  # noqa: PTH123
                ran, waited, _ = map(int, file.read().split())
                yield ran, waited


def _number(watched: int) -> int:
    """Return the process's number as /proc has it, which may be that of another process id namespace than ours.

    Raises:
        ValueError: it has none there.
    """
    with open(f"/proc/self/fdinfo/{watched}") as file:  # noqa: PTH123
        fields = dict(line.split(":", 1) for line in file)
    number = int(fields.get("Pid", "-1"))
    if number <= 0:
        raise ValueError("the process is not in this /proc")
    return number
