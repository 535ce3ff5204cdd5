"""The lease by which one of several coordinators leads a run; its term is a fencing token, which scripts check.

The lease is an expiring key, released by an orderly stop. Scripts refuse outdated terms, so correctness does not depend
on clocks. A thread renews it, so that what holds up the event loop for a moment, such as many requests on a busy machine,
does not end a term; a loop that is held up for ``HELD_UP_S`` loses it.
"""

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable

from prometheus_client import Gauge

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.run.leader_lease import claim_lease, leave_lease
from penstock.shared.errors import BusUnavailable

log = logging.getLogger(__name__)

LEADING = Gauge("penstock_coordinator_leading", "1 while this coordinator leads the run, else 0.")

TTL_S = 3.0
HELD_UP_S = 9.0
_CLOSE_S = 30.0


class Lease:
    def __init__(
        self, bus: Bus, replica: str, ttl_s: float = TTL_S, close_s: float = _CLOSE_S, held_up_s: float = HELD_UP_S
    ) -> None:
        self._bus = bus
        self._replica = replica
        self._process = uuid.uuid4().hex[:8]
        self._ttl_s = ttl_s
        self._close_s = close_s
        self._held_up_s = held_up_s
        self._ran_s = 0.0
        """When the event loop last ran (monotonic)."""
        self._until_s = 0.0
        self.term = 0
        """Fencing token; 0 while another leads."""
        self.leader = ""

    @property
    def leading(self) -> bool:
        """Whether this coordinator leads, by its own clock."""
        return self.term > 0 and time.monotonic() < self._until_s

    async def run(self, lead: Callable[[int], Awaitable[None]], stop: asyncio.Event | None = None) -> None:
        """Run ``lead(term)`` under the lease until it returns; it is cancelled if the lease is lost. Once ``stop`` is set,
        it is not run again.

        Raises:
            RuntimeError: it does not end although it was cancelled; the process must be restarted.
        """
        try:
            while True:
                await self._claim(self._bus)
                if self.leading and (await self._lead(lead) or (stop is not None and stop.is_set())):
                    return
                await asyncio.sleep(self._ttl_s / 3)
        finally:
            self._set(0)
            await self._leave()

    async def _lead(self, lead: Callable[[int], Awaitable[None]]) -> bool:
        term = self.term
        log.info("leading", extra={"term": term})
        self._ran_s = time.monotonic()
        leading, over = asyncio.ensure_future(lead(term)), threading.Event()
        renewing = asyncio.ensure_future(asyncio.to_thread(lambda: asyncio.run(self._renew(over))))
        try:
            while self.leading and self.term == term and not leading.done():  # a new term: the bus lost its data
                await asyncio.wait([leading, renewing], timeout=self._ttl_s / 3, return_when=asyncio.FIRST_COMPLETED)
                self._ran_s = time.monotonic()
        finally:
            over.set()
            await asyncio.wait([renewing])
            if not (ended := leading.done()):
                leading.cancel()
            self._set(0)
            if not (await asyncio.wait([leading], timeout=self._close_s))[0]:
                raise RuntimeError(
                    f"the loops of term {term} have not ended within {self._close_s:g} s of their cancellation"
                )
            with contextlib.suppress(asyncio.CancelledError):
                await leading
        renewing.result()
        if not ended:
            log.warning("no longer leading", extra={"leader": self.leader})
        return ended

    async def _renew(self, over: threading.Event) -> None:
        """Renew the lease until ``over``, in a thread of its own: nothing else runs in its event loop."""
        bus = self._bus.again()
        try:
            while not over.wait(self._ttl_s / 3) and time.monotonic() - self._ran_s < self._held_up_s:
                with contextlib.suppress(TimeoutError, BusUnavailable):
                    async with asyncio.timeout(max(0.0, self._until_s - time.monotonic())):
                        await self._claim(bus)
        finally:
            await bus.close()

    async def _claim(self, bus: Bus) -> None:
        asked_s = time.monotonic()
        term, self.leader = await claim_lease(bus, self._replica, self._process, self._ttl_s)
        self._until_s = asked_s + self._ttl_s
        self._set(term)

    def _set(self, term: int) -> None:
        self.term = term
        LEADING.set(term > 0)

    async def _leave(self) -> None:
        with contextlib.suppress(TimeoutError, BusUnavailable):
            async with asyncio.timeout(1.0):
                await leave_lease(self._bus, self._process)
