"""A process's heartbeats and events on the bus."""

import asyncio
import dataclasses
import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import psutil
from prometheus_client import Gauge

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Event, Json, PolicyVersion
from penstock.shared.bus.stores.replicas.heartbeats import (
    Heard,
    Heartbeat,
    PartFailure,
    beat_once,
    count_start,
    note_left,
    note_told,
    own_node,
)
from penstock.shared.bus.stores.run.functions import Change
from penstock.shared.bus.streams import EVENTS, MEMORY
from penstock.shared.process.memory_timeline import MemoryTimeline
from penstock.shared.process.start_up import StartUp
from penstock.shared.shelf.shelf import Shelf
from penstock.shared.text.redaction import redacted

log = logging.getLogger(__name__)


BUS_AVAILABLE = Gauge(
    "penstock_bus_available", "1 while the bus answers this process, else 0; NaN where no bus is used."
)
BUS_AVAILABLE.set(math.nan)  # for the executor, which has no bus
_EVENT_EVERY_S = 60.0


WEIGHTS_PROBE = "weights probe"


@dataclasses.dataclass(slots=True)
class Status:
    """Written by a service's parts, read by its heartbeat and /readyz."""

    state: str = "starting"
    version: PolicyVersion | None = None
    last_error: str = ""
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    address: str = ""
    source: str = ""
    """``host:port`` of weights for other replicas."""
    turns: str = ""
    """``host:port`` at which a replica draws turns of episodes."""
    shelf: Shelf | None = None
    settings_revision: int = 0
    taking: bool = True
    failures: dict[str, PartFailure] = dataclasses.field(default_factory=dict)
    """By part."""
    memory: MemoryTimeline = dataclasses.field(default_factory=MemoryTimeline)
    gpus: tuple[str, ...] = ()
    start: StartUp = dataclasses.field(default_factory=StartUp)

    @property
    def ready(self) -> bool:
        return self.state in ("replaying", "working", "waiting", "degraded")

    def note_memory(self, memory: Mapping[str, float]) -> None:
        """Note bytes by component, for the choice of a rung; the largest are kept, for a coordinator that starts later."""
        for component, nbytes in memory.items():
            name = f"memory_{component}"
            self.values[name] = max(self.values.get(name, 0.0), nbytes)


class Presence:
    """Sends heartbeats every ``heartbeat_s``; calls ``hear`` with what each reads."""

    def __init__(
        self,
        bus: Bus,
        service: str,
        replica: str,
        heartbeat_s: float,
        status: Status,
        hear: Callable[[Heard], Awaitable[None]] | None = None,
    ) -> None:
        self._bus = bus
        self._service = service
        self._replica = replica
        self._heartbeat_s = heartbeat_s
        self._status = status
        self._hear = hear
        self._started_at_s = time.time()
        BUS_AVAILABLE.set_function(lambda: bus.available)  # current even while a heartbeat waits

    async def run(self, stop: asyncio.Event) -> None:
        """Send heartbeats until ``stop``, then remove the last."""
        process = psutil.Process()
        name = f"{socket.gethostname()}:{os.getpid()}:{self._started_at_s!r}"
        starts, died = await count_start(self._bus, self._replica, name)
        if died and starts > 1:
            detail = f"{self._replica} was started again after it had died: start {starts}, process {os.getpid()}"
            await tell(self._bus, self._replica, "service restarted", detail, starts=starts)
        while not stop.is_set():
            reported = self._status.settings_revision, self._status.taking
            heard = await self._beat(process, starts)
            if self._hear is not None:
                await self._hear(heard)
            if (self._status.settings_revision, self._status.taking) != reported:
                continue  # report at once what was heard
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await stop.wait()
            except TimeoutError:
                continue

    async def note_told(self, stop: asyncio.Event) -> None:
        """Once the process is to stop, note that its end is no death, however long it takes."""
        await stop.wait()
        await note_told(self._bus, self._replica)

    async def leave(self) -> None:
        await note_left(self._bus, self._replica)

    async def _beat(self, process: psutil.Process, starts: int) -> Heard:
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
            values=self._status.values | (self._status.shelf.values if self._status.shelf is not None else {}),
            source=self._status.source,
            turns=self._status.turns,
            shelf=self._status.shelf.address if self._status.shelf is not None else "",
            settings_revision=self._status.settings_revision,
            taking=self._status.taking,
            starts=starts,
            node=own_node(),
            failures=tuple(self._status.failures.values()),
            gpus=self._status.gpus,
            activity=self._status.start.activity,
            activity_since_s=self._status.start.since_s,
        )
        heard = await beat_once(self._bus, beat, self._heartbeat_s)
        for report in self._status.memory.take(self._replica):
            await self._bus.publish(MEMORY, report)
        return heard


class HandlerFailures:
    def __init__(self, part: str, bus: Bus, replica: str, status: Status) -> None:
        self._part = part
        self._bus = bus
        self._replica = replica
        self._status = status
        self._told_s = -math.inf

    async def note(self, group: str, error: str) -> None:
        before, problem = self._status.failures.get(self._part), f"group {group[:100]}"
        failed = 1 + (before.failed if before else 0)
        self._status.failures[self._part] = PartFailure(self._part, error[:500], problem, failed, 0, time.time())
        if time.monotonic() - self._told_s > _EVENT_EVERY_S:
            self._told_s = time.monotonic()
            await tell(self._bus, self._replica, f"{self._part} failed", f"{problem}: {error[:500]}")


async def tell(bus: Bus, source: str, name: str, detail: str, **fields: Json) -> None:
    """Log an event, and publish it without secrets: people read events on the page and pass reports on."""
    log.info(name, extra={"detail": detail, **fields})
    detail = redacted(detail)
    await bus.publish(EVENTS, Event(at_s=time.time(), source=source, name=name, detail=detail, fields=fields))


async def tell_changed(bus: Bus, source: str, changed: Sequence[Change]) -> None:
    """Report functions of the user's own whose code has changed."""
    for change in changed:
        log.warning("code changed", extra={"detail": change.sentence})
        await tell(bus, source, "code changed", change.sentence, function=change.function, version=change.version)
