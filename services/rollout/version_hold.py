"""The version kept for an evaluation (``penstock.shared.bus.stores.policy.evaluations``), and the maximum time."""

import time
from collections.abc import Awaitable, Callable

from prometheus_client import Gauge

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.bus.stores.policy.evaluations import Holding, announced, holding

HELD_VERSION = Gauge(
    "penstock_rollout_held_version", "The version that this replica keeps for an evaluation; -1: none."
)
_LOOK_S = 5.0
"""Longest time between two looks: what changes is announced, but not by a bus that loses it."""
_SOON_S = 0.01


class Hold:
    def __init__(self, bus: Bus, replica: str) -> None:
        self._bus = bus
        self._replica = replica
        self._seen: Holding | None = None
        self._until_s = 0.0
        self._untold = False
        """Whether another reader saw a change that ``run`` has yet to report."""

    @property
    def version(self) -> PolicyVersion | None:
        """The version to keep; None: follow the head."""
        if self._seen is None or not self._seen.names(self._replica) or time.monotonic() >= self._until_s:
            return None
        return self._seen.version

    async def refresh(self) -> None:
        held = await holding(self._bus)
        known = self._seen
        if held is not None and (known is None or known.version != held.version):
            self._until_s = time.monotonic() + held.timeout_s
        self._untold |= held != known
        self._seen = held

    async def run(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Follow what is announced, forever; call ``changed`` after each change."""
        told: PolicyVersion | None = None
        after = await announced(self._bus)
        while True:
            await self.refresh()
            if self._untold or self.version != told:
                told, self._untold = self.version, False
                HELD_VERSION.set(-1 if told is None else told)
                await changed()
            wait_s = _LOOK_S if told is None else min(_LOOK_S, max(_SOON_S, self._until_s - time.monotonic()))
            after = await announced(self._bus, after, wait_s)
