"""Heartbeats of replicas, and whether the previous process left in order."""

import dataclasses
import json
import logging
import os
import socket
from collections.abc import Sequence

from pydantic import TypeAdapter

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import key
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.bus.stores.replicas.cordon import CORDONS
from penstock.shared.bus.stores.replicas.live_settings import LIVE
from penstock.shared.bus.stores.replicas.run_secret import SECRET

log = logging.getLogger(__name__)

SERVICES = key("services", "set", "the run's", "names of the replicas that were seen")
SERVICE = key("service:<replica>", "string", "five heartbeats", "the newest heartbeat of a replica (JSON)")
STARTS = key("starts:<replica>", "set", "the run's", "every process of a replica, each under a name of its own")
LEFT = key(
    "left:<replica>",
    "string",
    "until the next start",
    "exists if the replica's last process left in order, or was to stop",
)

MISSED_HEARTBEATS = 5
_SOME = 32


@dataclasses.dataclass(frozen=True, slots=True)
class PartFailure:
    """Failures of one part of a replica."""

    part: str
    """For people: ``scorer 'answer'``."""
    reason: str
    problem: str
    """Newest failure's dataset row, ``file:line``."""
    failed: int
    """Failed groups since the start, counting attempts."""
    in_a_row: int
    """0: it works again."""
    at_s: float
    """Newest failure, Unix seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Heartbeat:
    """A replica's report every ``heartbeat_s``, with a TTL."""

    service: str
    replica: str
    state: str
    """``starting``, ``working``, ``waiting``, ``degraded``, ``stopping``."""
    version: PolicyVersion | None
    host: str
    pid: int
    address: str
    """``host:port`` of its HTTP endpoints."""
    started_at_s: float
    seen_at_s: float
    memory_bytes: int
    last_error: str
    values: dict[str, float]
    """The service's figures: tokens_per_s, held, …"""
    source: str = ""
    """``host:port`` of its weights for other replicas; empty: none, as where it streams them into its live parameters."""
    turns: str = ""
    """``host:port`` at which it draws turns of episodes; empty: none."""
    shelf: str = ""
    """``host:port`` of its shelf for large payloads; empty: none."""
    settings_revision: int = 0
    taking: bool = True
    """False while cordoned."""
    starts: int = 1
    """Processes under this name in this run."""
    failures: tuple[PartFailure, ...] = ()
    gpus: tuple[str, ...] = ()
    """GPUs that it holds, by number on its host; those of other hosts of the same replica are ``host:number``."""
    activity: str = ""
    """What it does until it is ready; empty afterwards."""
    activity_since_s: float = 0.0
    """Unix seconds."""
    node: str = ""
    """Machine of its host; empty: of an older Penstock, its host (:func:`own_node`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """Values on the bus that a replica reads with each heartbeat; None: not set."""

    order: bytes | None
    """For ``Cordon.hear``."""
    revision: bytes | None
    """For ``Live.hear``."""
    secret: bytes | None
    """For ``RunSecret.hear``."""


def own_node() -> str:
    """Return the name of this machine, which pods of one node share: NODE_NAME, where the Helm chart sets it, or the host's."""
    return os.environ.get("NODE_NAME") or socket.gethostname()


async def beat_once(bus: Bus, beat: Heartbeat, heartbeat_s: float) -> Heard:
    """Write a heartbeat, which expires unless renewed, and read, in one round trip: a fleet's largest cost when idle."""
    heard = await bus.script(
        "beat", heartbeat=SERVICE.of(beat.replica), orders=CORDONS, revisions=LIVE, run_secret=SECRET,
        replica=beat.replica, text=json.dumps(dataclasses.asdict(beat)),
        ttl_ms=int(heartbeat_s * MISSED_HEARTBEATS * 1000),
    )  # fmt: skip
    return Heard(*heard)


async def note_told(bus: Bus, replica: str) -> None:
    """Note that the replica has received a request to stop."""
    await bus.write(LEFT.of(replica), "SET", "1")


async def note_left(bus: Bus, replica: str) -> None:
    """Remove the heartbeat: the replica left in order."""
    await note_told(bus, replica)
    await bus.write(SERVICE.of(replica), "DEL")


async def left(bus: Bus, replicas: Sequence[str]) -> frozenset[str]:
    """Return those of ``replicas`` that left in order, or are to leave."""
    marks = await bus.ask("MGET", *map(LEFT.of, replicas)) if replicas else ()
    return frozenset(replica for replica, mark in zip(replicas, marks, strict=True) if mark is not None)


async def count_start(bus: Bus, replica: str, process: str) -> tuple[int, bool]:
    """Return a replica's number of starts, and whether the previous process died.

    Starts are a set, so a repeated write counts once.
    """
    await bus.write(STARTS.of(replica), "SADD", process)
    starts = int(await bus.ask("SCARD", STARTS.of(replica)))
    left = await bus.get(LEFT.of(replica))
    await bus.write(LEFT.of(replica), "DEL")
    return starts, left is None


async def heartbeats(bus: Bus) -> list[Heartbeat]:
    """Return all heartbeats, by replica name."""
    names = sorted(name.decode(errors="replace") for name in await bus.smembers(SERVICES))
    if not names:
        return []
    texts = await bus.ask("MGET", *map(SERVICE.of, names))
    beats = [_heartbeat(text) for text in texts if text is not None]
    return [beat for beat in beats if beat is not None]


async def ages_s(bus: Bus, beats: Sequence[Heartbeat], heartbeat_s: float) -> dict[str, float]:
    """Return the seconds since each replica's heartbeat by the bus's clock, as those of hosts differ."""
    lives_ms = await bus.ask_all(*(("PTTL", SERVICE.of(beat.replica)) for beat in beats)) if beats else ()
    longest_s = MISSED_HEARTBEATS * heartbeat_s
    return {beat.replica: longest_s - life_ms / 1000 for beat, life_ms in zip(beats, lives_ms, strict=True)}


async def some_heartbeats(bus: Bus) -> list[Heartbeat]:
    """Return heartbeats of a few replicas, drawn at random: a fleet's are too many to read for each."""
    names = [name.decode(errors="replace") for name in await bus.ask("SRANDMEMBER", SERVICES, _SOME)]
    beats = [await heartbeat_of(bus, name) for name in names]
    return [beat for beat in beats if beat is not None]


async def heartbeat_of(bus: Bus, replica: str) -> Heartbeat | None:
    """Return a replica's heartbeat; None if it is silent."""
    text = await bus.get(SERVICE.of(replica))
    return None if text is None else _heartbeat(text)


async def count_replicas(bus: Bus) -> int:
    """Return how many replicas were seen."""
    return int(await bus.ask("SCARD", SERVICES))


async def echo(bus: Bus, nbytes: int) -> None:
    """Send ``nbytes`` to the bus's server and back."""
    await (bus.ask("ECHO", bytes(nbytes)) if nbytes else bus.ask("PING"))


_HEARTBEAT = TypeAdapter(Heartbeat)


def _heartbeat(text: bytes) -> Heartbeat | None:
    """Parse a heartbeat; None if invalid."""
    try:
        return _HEARTBEAT.validate_json(text)
    except ValueError as error:
        log.warning("unreadable heartbeat skipped", extra={"error": str(error)[:200]})
        return None
