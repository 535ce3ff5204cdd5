"""What a process does until it is ready: shown by its heartbeat, then logged with the seconds of each activity.

Processor time beside them tells computing (imports, compilation) from waiting (storage, other processes).
"""

import collections
import itertools
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

log = logging.getLogger(__name__)

_MOST = 100


class StartUp:
    """The activities of one process's start; any thread may call it."""

    def __init__(self) -> None:
        self._begun = [_Begun("importing", psutil.Process().create_time(), 0.0)]
        self._ended = _Begun("", 0.0, 0.0)

    @property
    def activity(self) -> str:
        """The current activity; empty once the process is ready."""
        return "" if self._ended.at_s else self._begun[-1].activity

    @property
    def since_s(self) -> float:
        """Unix time at which the current activity began."""
        return self._begun[-1].at_s

    def begin(self, activity: str, at_s: float | None = None) -> None:
        if not self._ended.at_s and len(self._begun) < _MOST:
            self._begun.append(_begun(activity, at_s))

    def end(self) -> None:
        """The process is ready; later calls change nothing."""
        if not self._ended.at_s:
            self._ended = _begun("")
            spent = {"start_s": self.seconds(), "start_cpu_s": self.cpu_seconds()}
            log.info("ready", extra={"at_s": round(self._ended.at_s, 3), **spent})

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each activity so far, in order."""
        return self._spent(lambda begun: begun.at_s)

    def cpu_seconds(self) -> dict[str, float]:
        """Return the same as processor time of all threads, without child processes."""
        return self._spent(lambda begun: begun.cpu_s)

    def _spent(self, clock: "Callable[[_Begun], float]") -> dict[str, float]:
        ended = self._ended if self._ended.at_s else _begun("")
        spent: dict[str, float] = collections.defaultdict(float)
        for begun, following in itertools.pairwise([*self._begun, ended]):
            spent[begun.activity] += clock(following) - clock(begun)
        return {activity: round(spent_s, 3) for activity, spent_s in spent.items()}


class _Begun(NamedTuple):
    activity: str
    at_s: float
    cpu_s: float


def _begun(activity: str, at_s: float | None = None) -> _Begun:
    return _Begun(activity, time.time() if at_s is None else at_s, time.process_time())
