"""Give each program a core: of its own while there are as many cores as slots, else one that few others have.

A program on a core of its own loses no time to its neighbours' threads. The cores are asked for anew each time, because a container's
may change, and the choice is random, because other executors on the host choose as well.
"""

import collections
import contextlib
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


class Cores:
    """The cores that this process may use."""

    def __init__(self) -> None:
        self._programs: collections.Counter[int] = collections.Counter()

    @contextlib.contextmanager
    def take(self) -> Iterator[int]:
        """Give the block the number of a core on which the fewest programs run."""
        cores = sorted(os.sched_getaffinity(0))
        fewest = min(self._programs[core] for core in cores)
        core = random.choice([core for core in cores if self._programs[core] == fewest])
        self._programs[core] += 1
        try:
            yield core
        finally:
            self._programs[core] -= 1


def count() -> int:
    """Return how many programs can run at a time: the cores of this process, or fewer where its control groups have a quota."""
    cores = len(os.sched_getaffinity(0))
    return max(1, math.floor(min(cores, quota(_CGROUPS, Path("/proc/self/cgroup")))))


def quota(root: Path, membership: Path) -> float:
    """Return the cores' worth of time of a process's control group and of those above it; infinite without a quota.

    Args:
        root: where the control groups (version 2) are mounted.
        membership: the process's ``/proc/PID/cgroup``.
    """
    with contextlib.suppress(OSError):
        for line in membership.read_text(encoding="utf-8").splitlines():
            if line.startswith("0::"):
                group = root / line.removeprefix("0::").strip().lstrip("/")
                return min(_own_quota(folder) for folder in (group, *group.parents) if folder.is_relative_to(root))
    return math.inf


def _own_quota(folder: Path) -> float:
    try:
        allowed, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        return math.inf if allowed == "max" else int(allowed) / int(period)
    except (OSError, ValueError):
        return math.inf
