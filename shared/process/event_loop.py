"""Measure how long an event loop is blocked: the delay of a timer that fires every 10 ms.

::

    timer due ──────── delay ────────▶ timer runs        elapsed: time on the clock
                 └─ of it, the thread ran                cpu: computed by callbacks

Delay that is not CPU time of the loop's thread is due to a busy machine or another thread.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from prometheus_client import Gauge, Histogram

STALL = Histogram(
    "penstock_event_loop_stall_seconds",
    "Delay of a timer in the service's event loop: how long other work kept it from running.",
    buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0),
)
LONGEST = Gauge(
    "penstock_event_loop_longest_stall_seconds",
    "Longest such delay since the process began its work, by clock: elapsed, or cpu (processor time of the loop's thread in it).",
    ["clock"],
)
_PERIOD_S = 0.01


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
    longest_s, longest_cpu_s = 0.0, 0.0
    while True:
        due_s, cpu_s = time.monotonic() + _PERIOD_S, time.thread_time()
        await asyncio.sleep(_PERIOD_S)
        stall_s = max(0.0, time.monotonic() - due_s)
        STALL.observe(stall_s)
        longest_s = max(longest_s, stall_s)
        longest_cpu_s = max(longest_cpu_s, min(stall_s, time.thread_time() - cpu_s))
        LONGEST.labels("elapsed").set(longest_s)
        LONGEST.labels("cpu").set(longest_cpu_s)
