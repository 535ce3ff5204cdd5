"""Pin each program to a least used core, so that neighbours' threads cost it no time.

The core set is re-read, because a container's may change. Ties break at random, because other executors share the
host.
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
        """Yield a core that runs the fewest programs."""
        cores = sorted(os.sched_getaffinity(0))
        fewest = min(self._programs[core] for core in cores)
        core = random.choice([core for core in cores if self._programs[core] == fewest])
        self._programs[core] += 1
        try:
            yield core
        finally:
            self._programs[core] -= 1


def count() -> int:
    """Return the number of usable cores, considering cgroup quotas."""
    cores = len(os.sched_getaffinity(0))
    return max(1, math.floor(min(cores, quota(_CGROUPS, Path("/proc/self/cgroup")))))


def quota(root: Path, membership: Path) -> float:
    """Return the CPU quota in cores of a process's cgroup and its ancestors; infinite without one.

    Args:
        root: mount point of cgroups version 2.
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
