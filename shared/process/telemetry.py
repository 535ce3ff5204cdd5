"""What a process tells of itself on the bus: a heartbeat, and events for people. Its HTTP side is ``endpoints``."""

import asyncio
import dataclasses
import json
import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable

import psutil
from prometheus_client import Gauge
from pydantic import TypeAdapter

from shared.bus.bus import Bus
from shared.bus.messages import Event, Json, PolicyVersion
from shared.bus.streams import EVENTS

log = logging.getLogger(__name__)


BUS_AVAILABLE = Gauge(
    "penstock_bus_available", "1 while the bus answers this process, else 0; NaN where it needs none."
)
BUS_AVAILABLE.set(math.nan)  # the executor's: 0 would be an outage
MISSED_HEARTBEATS = 5
_EVENT_EVERY_S = 60.0
"""A replica that has been silent for so many heartbeats is gone."""


WEIGHTS_PROBE = "weights probe"
"""The part of a replica that compares its logprobs with the trainer's."""


@dataclasses.dataclass(frozen=True, slots=True)
class PartFailure:
    """What one part of a replica could not do, why, and how often."""

    part: str
    """For people: ``scorer 'answer'``."""
    reason: str
    """The newest cause."""
    problem: str
    """The dataset row of the newest failure, ``file:line``."""
    failed: int
    """Groups that it failed on since the replica started, each attempt counted."""
    in_a_row: int
    """Of these, since it last succeeded; 0: it works again."""
    at_s: float
    """When it last failed, Unix seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a replica says every ``heartbeat_s``; it vanishes by its TTL when the replica is gone."""

    service: str
    replica: str
    state: str
    """``starting``, ``working``, ``waiting``, ``degraded``, ``stopping``."""
    version: PolicyVersion | None
    """The policy version that it holds, where it holds one."""
    host: str
    pid: int
    address: str
    """``host:port`` of its HTTP endpoints."""
    started_at_s: float
    seen_at_s: float
    memory_bytes: int
    last_error: str
    values: dict[str, float]
    """Service's own figures: tokens_per_s, held, …"""
    source: str = ""
    """``host:port`` where this replica serves the weights that it holds to others; empty: nowhere."""
    settings_revision: int = 0
    """Under which revision of the live settings it works."""
    taking: bool = True
    """Whether it takes new work; not while it is cordoned."""
    starts: int = 1
    """Number of processes that this run has had under this name, including this one."""
    failures: tuple[PartFailure, ...] = ()
    """What its parts could not do."""


@dataclasses.dataclass(slots=True)
class Status:
    """What a service's parts write and its heartbeat and /readyz read."""

    state: str = "starting"
    version: PolicyVersion | None = None
    last_error: str = ""
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    address: str = ""
    """``host:port`` of the HTTP endpoints."""
    source: str = ""
    """``host:port`` where weights are served to other replicas."""
    settings_revision: int = 0
    taking: bool = True
    failures: dict[str, PartFailure] = dataclasses.field(default_factory=dict)
    """By part."""

    @property
    def ready(self) -> bool:
        """Whether the service does its work."""
        return self.state in ("working", "waiting", "degraded")


class Presence:
    """Tells the bus every ``heartbeat_s`` that this replica is there; ``hear`` is called before, to learn what it is told."""

    def __init__(
        self,
        bus: Bus,
        service: str,
        replica: str,
        heartbeat_s: float,
        status: Status,
        hear: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._bus = bus
        self._service = service
        self._replica = replica
        self._heartbeat_s = heartbeat_s
        self._status = status
        self._hear = hear
        self._started_at_s = time.time()
        BUS_AVAILABLE.set_function(lambda: bus.available)  # a beat waits while the bus is gone, a scrape does not

    async def run(self, stop: asyncio.Event) -> None:
        """Beat until ``stop``, then take the heartbeat away."""
        process = psutil.Process()
        starts = await self._count_start()
        if await self._died_before() and starts > 1:
            detail = f"{self._replica} was started again after it had died: start {starts}, process {os.getpid()}"
            await tell(self._bus, self._replica, "service restarted", detail, starts=starts)
        while not stop.is_set():
            if self._hear is not None:
                await self._hear()
            await self._beat(process, starts)
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await stop.wait()
            except TimeoutError:
                continue

    async def leave(self) -> None:
        """Take the heartbeat away: the replica left by itself."""
        await self._bus.write(self._bus.keys.left(self._replica), "SET", "1")
        await self._bus.call(lambda: self._bus.client.delete(self._bus.keys.service(self._replica)))

    async def _died_before(self) -> bool:
        """Whether the process of this name before this one did not leave in order."""
        key = self._bus.keys.left(self._replica)
        left = await self._bus.call(lambda: self._bus.client.get(key))
        await self._bus.write(key, "DEL")
        return left is None

    async def _count_start(self) -> int:
        """Return the number of starts of this replica. Each start is a member of a set, so a repeated write counts it once."""
        key = self._bus.keys.starts(self._replica)
        await self._bus.write(key, "SADD", f"{socket.gethostname()}:{os.getpid()}:{self._started_at_s!r}")
        return int(await self._bus.call(lambda: self._bus.client.scard(key)))

    async def _beat(self, process: psutil.Process, starts: int) -> None:
        beat = Heartbeat(
            service=self._service,
            replica=self._replica,
            state=self._status.state,
            version=self._status.version,
            host=socket.gethostname(),
            pid=os.getpid(),
            address=self._status.address,
            started_at_s=self._started_at_s,
            seen_at_s=time.time(),
            memory_bytes=process.memory_info().rss,
            last_error=self._status.last_error[:500],
            values=dict(self._status.values),
            source=self._status.source,
            settings_revision=self._status.settings_revision,
            taking=self._status.taking,
            starts=starts,
            failures=tuple(self._status.failures.values()),
        )
        text = json.dumps(dataclasses.asdict(beat))
        ttl_ms = int(self._heartbeat_s * MISSED_HEARTBEATS * 1000)
        keys = self._bus.keys
        await self._bus.write(keys.service(self._replica), "SET", text, "PX", ttl_ms)
        await self._bus.write(keys.services, "SADD", self._replica)


async def heartbeats(bus: Bus) -> list[Heartbeat]:
    """Return the heartbeats of every replica that is there, by name."""
    members = await bus.call(lambda: bus.client.smembers(bus.keys.services))
    names = sorted(name.decode(errors="replace") for name in members)
    if not names:
        return []
    texts = await bus.call(lambda: bus.client.mget([bus.keys.service(name) for name in names]))
    beats = [_heartbeat(text) for text in texts if text is not None]
    return [beat for beat in beats if beat is not None]


_HEARTBEAT = TypeAdapter(Heartbeat)


def _heartbeat(text: bytes) -> Heartbeat | None:
    """Read a heartbeat; what a newer version says besides is ignored, and what is none is passed over."""
    try:
        return _HEARTBEAT.validate_json(text)
    except ValueError as error:
        log.warning("unreadable heartbeat passed over", extra={"error": str(error)[:200]})
        return None


class HandlerFailures:
    """Exceptions of one replica's handlers that are bugs: for its heartbeat, from which notices are made, and for events.

    Args:
        part: the name of the handler, for people.
    """

    def __init__(self, part: str, bus: Bus, replica: str, status: Status) -> None:
        self._part = part
        self._bus = bus
        self._replica = replica
        self._status = status
        self._told_s = -math.inf

    async def note(self, group: str, error: str) -> None:
        """Note that an exception cost a group an attempt."""
        before, problem = self._status.failures.get(self._part), f"group {group[:100]}"
        failed = 1 + (before.failed if before else 0)
        self._status.failures[self._part] = PartFailure(self._part, error[:500], problem, failed, 0, time.time())
        if time.monotonic() - self._told_s > _EVENT_EVERY_S:
            self._told_s = time.monotonic()
            await tell(self._bus, self._replica, f"{self._part} failed", f"{problem}: {error[:500]}")


async def tell(bus: Bus, source: str, name: str, detail: str, **fields: Json) -> None:
    """Write an event for people, on the bus and in the log."""
    log.info(name, extra={"detail": detail, **fields})
    await bus.publish(EVENTS, Event(at_s=time.time(), source=source, name=name, detail=detail, fields=fields))
