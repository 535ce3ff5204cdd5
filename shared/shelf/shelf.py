"""The shelf of one process: put payloads with their copies, fetch them, delete what no entry of the bus needs."""

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from urllib.parse import quote

from prometheus_client import Counter, Gauge

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.claims import Claim, Holder
from penstock.shared.bus.stores.replicas.heartbeats import (
    Heartbeat,
    count_replicas,
    heartbeat_of,
    own_node,
    some_heartbeats,
)
from penstock.shared.errors import BusUnavailable, PeerError, ShelfLost
from penstock.shared.peers.addresses import reachable
from penstock.shared.peers.handshake import Secret
from penstock.shared.settings import Settings
from penstock.shared.shelf import protocol
from penstock.shared.shelf.listener import Listener
from penstock.shared.shelf.store import ShelfFull, Store

log = logging.getLogger(__name__)

PUT = Counter(
    "penstock_shelf_payloads_total",
    "Large payloads by where they went: shelved (with every copy, one on another host), same_host (all copies on this one), "
    "inline (over the bus: no room, or no other replica for a copy).",
    ["outcome"],
)
STORED = Gauge("penstock_shelf_bytes", "Bytes of payloads on this process's shelf.")
_PARTNERS_S = 30.0
_AGAIN_S = 0.5
_COPIES = 2
_COPIES_S = 10.0
"""For all copies of a payload, after which the bus carries it."""
_AVOIDED_S = 10.0
"""After which a shelf that did not answer in time is asked again, by one request."""
_AT_ONCE = 16
"""Connections of a process: a listener admits 64 that are not through their handshake yet."""
_LOST_ERRORS = (PeerError, OSError, TimeoutError)
_HOLDERS = ("rollout", "reward", "episodes")
_LAST_SWEEP_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """``above_bytes``: larger payloads are shelved; 0: the bus carries all. ``copies``: with the own one. ``lost_after_s``: how
    long a silent holder is waited for. ``sweep_s``: between two sweeps.
    """

    above_bytes: int
    copies: int
    lost_after_s: float = 30.0
    sweep_s: float = 30.0


class Shelf:
    """On one event loop. ``address``: where it is served, "": nowhere; ``keeps``: whether it keeps what it fetches."""

    def __init__(
        self,
        bus: Bus,
        store: Store,
        replica: str,
        secret: Secret,
        limits: Limits,
        address: str = "",
        *,
        keeps: bool = False,
    ) -> None:
        self._bus, self._store, self._replica, self._secret, self._limits = bus, store, replica, secret, limits
        self.address, self._keeps = address, keeps
        self._connections = asyncio.Semaphore(_AT_ONCE)
        self._partners: list[Heartbeat] = []
        self._partners_until_s = 0.0
        self._silent_since_s: dict[str, float] = {}
        self._avoided_until_s: dict[str, float] = {}
        """By replica whose shelf did not answer in time, whatever its heartbeats say."""
        self.values = {"shelf_bytes": 0.0, "shelf_inline": 0.0}
        """For the heartbeat: bytes here, and payloads that the bus had to carry."""
        for outcome in ("shelved", "same_host", "inline"):
            PUT.labels(outcome)
        STORED.set_function(lambda: store.nbytes)

    def takes(self, size: int) -> bool:
        """Whether a payload of ``size`` bytes is kept on shelves."""
        return bool(self.address) and 0 < self._limits.above_bytes < size

    async def put(self, payload: bytes, group_id: int, prompt: bytes = b"") -> Claim | None:
        """Keep a payload of a group here and on other replicas; None: not all copies were confirmed."""
        needed, kept = self._limits.copies - 1, list[Heartbeat]()
        others = await self._others() if needed else ()
        digest = await asyncio.to_thread(lambda: hashlib.sha256(payload).hexdigest())
        if len(others) >= needed and await self._stored(group_id, digest, payload):
            self.values["shelf_bytes"] = float(self._store.nbytes)
            clock_s = asyncio.get_running_loop().time
            until_s = clock_s() + _COPIES_S
            for beat in others:
                if (
                    len(kept) < needed
                    and clock_s() < until_s
                    and await self._copied(beat, group_id, digest, payload, until_s)
                ):
                    kept.append(beat)
            if len(kept) == needed:
                is_apart = not needed or any(map(_is_elsewhere, kept))
                PUT.labels("shelved" if is_apart else "same_host").inc()
                holders = Holder(self._replica, self.address), *(Holder(beat.replica, beat.shelf) for beat in kept)
                return Claim(group_id, digest, len(payload), holders, prompt)
        PUT.labels("inline").inc()
        self.values["shelf_inline"] += 1
        return None

    async def _stored(self, group_id: int, digest: str, payload: bytes) -> bool:
        try:
            await asyncio.to_thread(self._store.put, group_id, digest, payload)
        except (ShelfFull, OSError) as error:
            log.warning("payload not shelved", extra={"group": group_id, "reason": str(error) or "the shelf is full"})
            return False
        return True

    async def _copied(self, beat: Heartbeat, group_id: int, digest: str, payload: bytes, until_s: float) -> bool:
        try:
            async with self._asking(beat.replica, until_s):
                if await protocol.put(beat.shelf, self._secret, group_id, digest, payload):
                    return True
            reason = "its shelf is full"
        except _LOST_ERRORS as error:
            reason = str(error) or type(error).__name__
        log.warning("no copy", extra={"group": group_id, "holder": beat.replica, "reason": reason})
        self._partners = [other for other in self._partners if other.replica != beat.replica]
        return False

    @contextlib.asynccontextmanager
    async def _asking(self, replica: str, until_s: float | None = None) -> AsyncIterator[None]:
        """Take a connection to a shelf until ``until_s`` of the event loop's time. Raises PeerError: it did not answer in
        time a moment ago, or the request that asks it again has no answer yet; TimeoutError.
        """
        avoided_s = self._avoided_until_s.get(replica, 0.0)
        if avoided_s > time.monotonic():
            raise PeerError("it did not answer in time a moment ago")
        if avoided_s:
            self._avoided_until_s[replica] = time.monotonic() + protocol.STALLED_S
        async with asyncio.timeout_at(until_s):
            await self._connections.acquire()
        try:
            async with asyncio.timeout_at(until_s):
                yield
        except TimeoutError:
            self._avoided_until_s[replica] = time.monotonic() + _AVOIDED_S
            raise
        except (PeerError, OSError):
            self._avoided_until_s.pop(replica, None)
            raise
        else:
            self._avoided_until_s.pop(replica, None)
        finally:
            self._connections.release()

    async def _others(self) -> Sequence[Heartbeat]:
        """Return replicas that may hold copies, those of other hosts first; the same ones for a while."""
        now_s = time.monotonic()
        if now_s >= self._partners_until_s or len(self._partners) < self._limits.copies - 1:
            beats = [beat for beat in await some_heartbeats(self._bus) if beat.shelf and beat.taking]
            others = [beat for beat in beats if beat.replica != self._replica and beat.state != "stopping"]
            self._partners = sorted(others, key=_is_elsewhere, reverse=True)
            self._partners_until_s = now_s + _PARTNERS_S
        return tuple(self._partners)

    async def fetch(self, claim: Claim) -> bytes:
        """Return a payload from the first holder that has it; this shelf may keep it.

        Raises:
            ShelfLost: no holder has it, or has answered within ``lost_after_s``.
        """
        payload = await asyncio.to_thread(self._store.read, claim.group_id, claim.digest)
        started_s = time.monotonic()
        while payload is None:
            waits = False
            for holder in sorted(claim.holders, key=lambda holder: holder.replica in self._silent_since_s):
                try:
                    payload = await self._fetched(holder, claim)
                except _LOST_ERRORS as error:
                    log.debug("holder silent", extra={"holder": holder.replica, "reason": str(error)})
                    waits |= await self._may_return(holder.replica, started_s)
                if payload is not None:
                    return await self._kept(claim, payload)
            if not waits or time.monotonic() - started_s > self._limits.lost_after_s:
                names = ", ".join(holder.replica for holder in claim.holders)
                raise ShelfLost(f"expected a payload of group {claim.group_id} on a shelf of {names}, found it on none")
            await asyncio.sleep(_AGAIN_S)
        return payload

    async def _kept(self, claim: Claim, payload: bytes) -> bytes:
        if self._keeps:
            await self._stored(claim.group_id, claim.digest, payload)
        return payload

    async def _fetched(self, holder: Holder, claim: Claim) -> bytes | None:
        """Return a payload, from where the holder served it or serves it now; None: it has it no more."""
        beat = await heartbeat_of(self._bus, holder.replica)
        address = beat.shelf if beat is not None and beat.shelf else holder.address
        asked = (address, self._secret, holder.replica, claim.group_id, claim.digest, claim.size)
        async with self._asking(holder.replica):
            payload = await protocol.get(*asked)
        if payload is None and beat is None:
            raise PeerError("another process listens at the holder's address")
        self._silent_since_s.pop(holder.replica, None)
        return payload

    async def _may_return(self, replica: str, started_s: float) -> bool:
        """Whether to wait for a silent holder: for each at most ``lost_after_s``, not for each of its payloads, unless
        it has a heartbeat and just refuses connections.
        """
        since_s = self._silent_since_s.setdefault(replica, time.monotonic())
        if replica not in self._avoided_until_s and await heartbeat_of(self._bus, replica) is not None:
            since_s = max(since_s, started_s)
        return time.monotonic() - since_s < self._limits.lost_after_s

    def drop(self, payloads: Sequence[tuple[int, str]]) -> None:
        """Delete payloads of this shelf, by group and digest."""
        self._store.drop(payloads)

    async def sweep(self) -> None:
        """Delete the payloads of groups that have left the bus: a group is in flight before its payloads are put."""
        if names := self._store.names:
            needed = await self._bus.needed({group for group, _ in names})
            if needed is not None:
                await asyncio.to_thread(self._store.drop, [name for name in names if name[0] not in needed])
                self.values["shelf_bytes"] = float(self._store.nbytes)

    async def keep_swept(self) -> None:
        """Sweep until cancelled; the larger the fleet, the less often."""
        wait_s = self._limits.sweep_s
        while True:
            await asyncio.sleep(wait_s)
            if not self._store.names:
                continue
            wait_s = max(self._limits.sweep_s, 0.1 * await count_replicas(self._bus))
            try:
                await self.sweep()
            except Exception:  # else nothing would be deleted any more
                log.exception("shelf not swept")


def _is_elsewhere(beat: Heartbeat) -> bool:
    """Whether a replica is on another machine: pods of one node are lost together."""
    return (beat.node or beat.host) != own_node()


@contextlib.asynccontextmanager
async def opened(
    bus: Bus, settings: Settings, service: str, replica: str, host: str, secret: Secret
) -> AsyncIterator["Shelf"]:
    """Let ``bus`` put payloads on a shelf, and read them, during the body.

    Replicas serve one if they put payloads there, or have some. The trainer keeps what it fetches, to replay its journal.
    """
    folder = (settings.internal.shelf_folder or settings.run_folder / "shelf") / quote(replica, safe="")
    store = Store(folder, settings.bus.shelf_bytes)
    limits = Limits(settings.bus.shelve_above_bytes, _COPIES, settings.internal.claim_after_s)
    is_served = service in _HOLDERS and bool(limits.above_bytes or settings.trainer.router_replay or store.names)
    listener = Listener(store, replica, host, secret) if is_served else None
    address = "" if listener is None else f"{reachable(host)}:{listener.port}"
    shelf = bus.shelf = Shelf(bus, store, replica, secret, limits, address, keeps=service == "trainer")
    tasks = [
        asyncio.create_task(work) for work in (shelf.keep_swept(), *([] if listener is None else [listener.run()]))
    ]
    try:
        yield shelf
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError, OSError, BusUnavailable):
            async with asyncio.timeout(_LAST_SWEEP_S):
                await shelf.sweep()
