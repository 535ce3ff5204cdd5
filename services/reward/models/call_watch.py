"""End this process when a call in a model's thread hangs.

A CUDA call that never returns cannot be cancelled, and only the end of its process frees the device for certain. The
event loop would renew the lease of a shared device for ever. Calls that are slow, but progress, never end it:

    =========  ====================================================  =====================================
    call       ends the process after, without progress              progress
    =========  ====================================================  =====================================
    a load     30 minutes                                            the process reads from or writes to a disk
    others     10 minutes, or 20 times the longest such call so far  on a CPU: the thread computes; else none
    =========  ====================================================  =====================================

A thread that waits for a GPU may spin, so its processor time shows nothing there; ``reward.models.batch_tokens`` limits
each pass. Time in which the whole process was stopped does not count.
"""

import asyncio
import contextlib
import dataclasses
import faulthandler
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal, NoReturn

log = logging.getLogger(__name__)

LOAD_S = 1800.0
"""As long as trainer ranks wait for each other to load."""
LEAST_S = 600.0
TIMES = 20.0
LOOK_S = 1.0

Work = Literal["forward pass", "move to the device", "move to host memory"]


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    name: str
    limit_s: float
    progress: Callable[[], object]
    seen: object = None
    still_s: float = 0.0
    """Seconds since its last progress."""


class ThreadClock:
    """Processor time of the thread that called :meth:`begin`, read from another one while that thread lives."""

    def __init__(self) -> None:
        self._clock: int | None = None

    def begin(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def whole_seconds(self) -> int:
        return 0 if self._clock is None else int(time.clock_gettime(self._clock))


class CallWatch:
    """Running calls of all models of this process; on the event loop. ``clock`` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls: list[_Call] = []
        self._longest_s: dict[tuple[str, str], float] = {}

    @contextlib.contextmanager
    def loading(self, model: str) -> Iterator[None]:
        with self._calling(_Call(f"the load of {model!r}", LOAD_S, _disk_traffic)):
            yield

    @contextlib.contextmanager
    def working(self, model: str, work: Work, clock: ThreadClock | None) -> Iterator[None]:
        """Watch ``work`` of ``model``; ``clock``: of its thread, if that computes by itself."""
        longest_s, started_s = self._longest_s.get((model, work), 0.0), self._clock()
        limit_s = max(LEAST_S, TIMES * longest_s)
        progress = _nothing if clock is None else clock.whole_seconds
        with self._calling(_Call(f"a {work} of {model!r}", limit_s, progress)):
            yield
        self._longest_s[model, work] = max(longest_s, self._clock() - started_s)

    @contextlib.contextmanager
    def _calling(self, call: _Call) -> Iterator[None]:
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.remove(call)

    def look(self, elapsed_s: float) -> str:
        """Count ``elapsed_s`` seconds; return why this process must end, or ""."""
        for call in self._calls:
            before, call.seen = call.seen, call.progress()
            call.still_s = call.still_s + elapsed_s if call.seen == before else 0.0
            if call.still_s >= call.limit_s:
                return (
                    f"{call.name} has made no progress for {call.still_s:.0f} s: its device or the model's code hangs, so this "
                    "process ends to free the device, and starts again; if the model is only slow, lower "
                    "reward.models.batch_tokens or change reward.models.device"
                )
        return ""

    async def hanging(self) -> str:
        """Wait until a call hangs; return a sentence that says so."""
        looked_s = self._clock()
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = self._clock()
            if sentence := self.look(min(now_s - looked_s, 2 * LOOK_S)):
                return sentence
            looked_s = now_s


def end_process(sentence: str) -> NoReturn:
    """End this process without exit handlers, which could wait for the device."""
    log.error(sentence)
    faulthandler.dump_traceback(sys.__stderr__ or 2)
    os.write(2, f"TimeoutError: {sentence}\n".encode())
    os._exit(1)


def _nothing() -> None:
    return None


def _disk_traffic() -> tuple[int, int, int]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_inblock, used.ru_oublock, used.ru_majflt
