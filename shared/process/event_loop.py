"""Measure how long an event loop is blocked: the delay of a timer that fires every 50 ms.

::

    timer due ──────── delay ────────▶ timer runs        elapsed: time on the clock
                 ├─ the thread ran                       cpu: computed by callbacks
                 └─ the thread ran, or waited in the     process: elapsed without waits for a core
                    process, say for the interpreter's lock

Delay that is in none but ``elapsed`` is due to a busy machine.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator

from prometheus_client import Gauge, Histogram

STALL = Histogram(
    "penstock_event_loop_stall_seconds",
    "Delay of a timer in the service's event loop: how long other work kept it from running.",
    buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0),
)
LONGEST = Gauge(
    "penstock_event_loop_longest_stall_seconds",
    "Longest such delay since the process began its work, by clock: elapsed, process (without waits for a core), or cpu (processor time of the loop's thread in it).",
    ["clock"],
)
_PERIOD_S = 0.05  # each wake-up of an idle process takes it 0.1 ms of processor time


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[None]:
    """Measure the running event loop while the body runs."""
    watching = asyncio.create_task(_watch(), name="event loop stalls")
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch() -> None:
    longest_s = dict.fromkeys(("elapsed", "process", "cpu"), 0.0)
    gauges = {clock: LONGEST.labels(clock) for clock in longest_s}
    with _schedstat() as schedstat:
        waited_s = _waited_s(schedstat)
        while True:
            due_s, cpu_s = time.monotonic() + _PERIOD_S, time.thread_time()
            await asyncio.sleep(_PERIOD_S)
            stall_s, waited_before_s, waited_s = max(0.0, time.monotonic() - due_s), waited_s, _waited_s(schedstat)
            STALL.observe(stall_s)
            stalls_s = {
                "elapsed": stall_s,
                "process": max(0.0, stall_s - (waited_s - waited_before_s)),
                "cpu": min(stall_s, time.thread_time() - cpu_s),
            }
            for clock, seconds in stalls_s.items():
                if seconds > longest_s[clock]:
                    longest_s[clock] = seconds
                    gauges[clock].set(seconds)


@contextlib.contextmanager
def _schedstat() -> Iterator[int | None]:
    try:
        descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _waited_s(schedstat: int | None) -> float:
    return 0.0 if schedstat is None else int(os.pread(schedstat, 100, 0).split()[1]) / 1e9
