"""What a process does until it is ready: shown by its heartbeat, then logged with the seconds of each activity."""

import collections
import logging
import time

import psutil

log = logging.getLogger(__name__)

_MOST = 100


class StartUp:
    """The activities of one process's start; any thread may call it."""

    def __init__(self) -> None:
        self._begun: list[tuple[str, float]] = [("importing", psutil.Process().create_time())]
        self._ended_s = 0.0

    @property
    def activity(self) -> str:
        """The current activity; empty once the process is ready."""
        return "" if self._ended_s else self._begun[-1][0]

    @property
    def since_s(self) -> float:
        """Unix time at which the current activity began."""
        return self._begun[-1][1]

    def begin(self, activity: str, at_s: float | None = None) -> None:
        if not self._ended_s and len(self._begun) < _MOST:
            self._begun.append((activity, time.time() if at_s is None else at_s))

    def end(self) -> None:
        """The process is ready; later calls change nothing."""
        if not self._ended_s:
            self._ended_s = time.time()
            log.info("ready", extra={"at_s": round(self._ended_s, 3), "start_s": self.seconds()})

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each activity so far, in order."""
        ends_s = [at_s for _, at_s in self._begun[1:]] + [self._ended_s or time.time()]
        seconds: dict[str, float] = collections.defaultdict(float)
        for (activity, began_s), end_s in zip(self._begun, ends_s, strict=True):
            seconds[activity] += end_s - began_s
        return {activity: round(spent_s, 3) for activity, spent_s in seconds.items()}
