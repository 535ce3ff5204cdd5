"""Heartbeats of the run's replicas, and whether the process before this one left in order."""

import dataclasses
import json
import logging

from pydantic import TypeAdapter

from shared.bus.bus import Bus
from shared.bus.keys import key
from shared.bus.messages import PolicyVersion

log = logging.getLogger(__name__)

SERVICES = key("services", "set", "the run's", "names of the replicas that were seen")
SERVICE = key("service:<replica>", "string", "five heartbeats", "the newest heartbeat of a replica (JSON)")
STARTS = key("starts:<replica>", "set", "the run's", "every process of a replica, each under a name of its own")
LEFT = key("left:<replica>", "string", "until the next start", "exists if the replica's last process left in order")

MISSED_HEARTBEATS = 5
"""A replica that has been silent for this many heartbeats is gone."""


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


async def beat_once(bus: Bus, beat: Heartbeat, heartbeat_s: float) -> None:
    """Write a replica's heartbeat, which expires when the next ones do not follow."""
    ttl_ms = int(heartbeat_s * MISSED_HEARTBEATS * 1000)
    await bus.write(SERVICE.of(beat.replica), "SET", json.dumps(dataclasses.asdict(beat)), "PX", ttl_ms)
    await bus.write(SERVICES, "SADD", beat.replica)


async def note_left(bus: Bus, replica: str) -> None:
    """Take the heartbeat away: the replica left in order."""
    await bus.write(LEFT.of(replica), "SET", "1")
    await bus.write(SERVICE.of(replica), "DEL")


async def count_start(bus: Bus, replica: str, process: str) -> tuple[int, bool]:
    """Return the number of starts of a replica, and whether the process before this one died.

    Each start is a member of a set, so a repeated write counts it once.
    """
    await bus.write(STARTS.of(replica), "SADD", process)
    starts = int(await bus.ask("SCARD", STARTS.of(replica)))
    left = await bus.get(LEFT.of(replica))
    await bus.write(LEFT.of(replica), "DEL")
    return starts, left is None


async def heartbeats(bus: Bus) -> list[Heartbeat]:
    """Return the heartbeats of every replica that is there, by name."""
    names = sorted(name.decode(errors="replace") for name in await bus.smembers(SERVICES))
    if not names:
        return []
    texts = await bus.ask("MGET", *map(SERVICE.of, names))
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
