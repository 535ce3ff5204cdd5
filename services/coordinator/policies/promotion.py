"""Make each published version the head, and notify the replicas of it and its sources (``relay_tree``).

Promotion and acknowledgement are one transaction, so each version is promoted once, in order.
"""

import logging
import time
from collections.abc import Callable

from prometheus_client import Histogram

from penstock.services.coordinator.policies.relay_tree import addresses, sources
from penstock.shared.bus.bus import Bus, Delivery
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.bus.stores.policy.evaluations import holding
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.streams import PUBLISHED
from penstock.shared.errors import MessageError
from penstock.shared.traces import TRACES

log = logging.getLogger(__name__)

PROMOTE_SECONDS = Histogram(
    "penstock_coordinator_promote_seconds",
    "Seconds from a version's commit to the moment at which it was the head.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0),
)

CONSUMER = "coordinator"
"""Shared, so that a successor takes over pending entries."""
_LOST_AFTER_S = 2.0


class Promotion:
    def __init__(self, bus: Bus, ledger: Ledger, fan_out: int, promoted: Callable[[PolicyVersion], None]) -> None:
        self._bus = bus
        self._ledger = ledger
        self._fan_out = fan_out
        self._promoted = promoted

    async def run(self) -> None:
        async for delivery in self._bus.own(PUBLISHED, PolicyRecord, CONSUMER):
            await self._promote(delivery)
        while True:
            deliveries = await self._bus.read(PUBLISHED, PolicyRecord, CONSUMER, 16, _LOST_AFTER_S / 2)
            if not deliveries:  # lost with a broken connection, or taken by another process
                deliveries = await self._bus.reclaim(PUBLISHED, PolicyRecord, CONSUMER, _LOST_AFTER_S, 1000)
            for delivery in deliveries:
                await self._promote(delivery)

    async def _promote(self, delivery: Delivery[PolicyRecord]) -> None:
        try:
            record = delivery.message()
            await self._check(record)
        except MessageError as error:
            log.error("published version cannot be read", extra={"entry": delivery.entry_id, "reason": str(error)})
            await self._bus.bury(delivery, str(error))
            return
        if not await self._ledger.promote(delivery, await self._sources(record)):
            return
        self._promoted(record.version)
        published_at_s = int(delivery.entry_id.partition("-")[0]) / 1000
        PROMOTE_SECONDS.observe(max(0.0, time.time() - published_at_s))
        for group in record.traced:
            TRACES.add("live", group, record.created_at_s, time.time(), version=int(record.version))
        log.info("policy live", extra={"version": int(record.version), "step": record.step})

    async def _check(self, record: PolicyRecord) -> None:
        known = await self._ledger.policy(record.version)
        if known is None or (known.manifest_digest, known.step) != (record.manifest_digest, record.step):
            raise MessageError(f"the ledger does not know version {record.version} of step {record.step}")

    async def _sources(self, record: PolicyRecord) -> dict[str, tuple[str, ...]]:
        if not record.source:
            return {}
        held = await holding(self._bus)
        # A replica holding an older version for an evaluation has nothing to relay.
        beats = [beat for beat in await heartbeats(self._bus) if held is None or not held.names(beat.replica)]
        return sources(addresses(beats), self._fan_out, record.source)
