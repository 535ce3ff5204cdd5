"""Hostile messages on every stream of a live run, then the exact audit.

::

    harvest (real entries of every stream) ──▶ mutate ──▶ XADD ──▶ services ──▶ dead letters, or dropped as a copy
                                                                       └──▶ honest groups, trained once each

Perfect forgeries of a group in flight are left out: only a signature could detect them.
"""

import copy
import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import NO_ENDINGS
from penstock.shared.bus.messages import StepReport
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat, heartbeats
from penstock.shared.bus.stores.run.records import with_payloads
from penstock.shared.bus.streams import Stream
from penstock.shared.errors import MessageError
from tests.chaos.run import Run, left_behind, running
from tests.support import builders
from tests.support.raw_redis import raw

DATA = tuple(stream for stream in streams.GROUPED_STREAMS if stream != streams.EPISODES)  # its service is not started
BROADCAST = (streams.POLICY, streams.STEPS, streams.EVENTS)
AT_ONCE = 48
FOREIGN = 10**12
"""Group ids of forgeries."""
FINE = ("trained", "dropped:stale", "dropped:run_ended")
FLAGS: Mapping[str, object] = {"internal.max_attempts": 2, "evaluation.every_steps": 25, "evaluation.problems": 8}


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    seed: int
    messages: int
    by_stream: dict[str, int]
    steps: int
    restarts: int
    hostile_trained: int
    trained_twice: int
    unaccounted: int
    honest_lost: int
    honest_groups: int


class Hostile:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._number = 0
        self._values: list[Callable[[], Any]] = [
            *(lambda value=value: copy.deepcopy(value) for value in _SCALARS),
            lambda: "x" * 100_000,
            lambda: list(range(70_000)),
            lambda: _deep(200),
            lambda: {str(number): number for number in range(1000)},
            lambda: wire._write_array(np.zeros((2, 3, 4), np.float32)),
            lambda: wire._write_array(np.array([-1, 2**31 - 1], np.int32)),
            lambda: wire._write_array(np.array([np.nan, np.inf], np.float32)),
            lambda: wire._write_array(np.array([0, 7], np.int32)),
            lambda: {"lengths": [10**9, -(10**9)], "joined": wire._write_array(np.zeros(3, np.int32))},
            lambda: {"rows": float("inf")},
            lambda: {"rows": 10**9},
        ]

    def entry(self, honest: Mapping[bytes, bytes], others: Sequence[Mapping[bytes, bytes]]) -> dict[bytes, bytes]:
        self._number += 1
        draw = self.random.random()
        if draw < 0.08:
            return dict(honest)  # replayed
        if draw < 0.16:
            return dict(self.random.choice(others))  # of another stream
        if draw < 0.26:
            return self._broken(honest)
        return self._mutated(honest)

    def _broken(self, honest: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        data, chance = honest[b"data"], self.random
        forms: list[dict[bytes, bytes]] = [
            {b"id": honest[b"id"], b"data": data[: chance.randrange(len(data))]},
            {b"id": honest[b"id"]},
            {b"data": data},
            {b"x": b"y"},
            {b"id": b"\xff\xfe", b"data": data},
            {b"id": honest[b"id"] * 1000, b"data": data},
            {b"id": honest[b"id"], b"data": chance.randbytes(300)},
            {b"id": honest[b"id"], b"data": b"\x91" * 2000},
            {b"id": str(FOREIGN).encode(), b"data": data},
        ]
        return chance.choice(forms)

    def _mutated(self, honest: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        fields = msgpack.unpackb(honest[b"data"], ext_hook=msgpack.ExtType, strict_map_key=False)
        number = FOREIGN + self._number
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            self._spoil(fields)
        group = _group(fields)
        if group is not None:
            group["group_id"] = number
        return {b"id": str(number).encode(), b"data": msgpack.packb(fields)}

    def _spoil(self, fields: Any) -> None:
        places = list(_places(fields))
        container, key = self.random.choice(places)
        if self.random.random() < 0.1 and isinstance(container, dict):
            del container[key]
            return
        container[key] = self.random.choice(self._values)()


_SCALARS: tuple[Any, ...] = (
    float("nan"), float("inf"), -float("inf"), -1, 0, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 1e308, -1e30, 10**6, 65_536,
    "", "hostile", "\x1b[2J", "\u202e", None, True, b"\xff\x00", [], {}, [[[]]], [None] * 3, msgpack.ExtType(5, b"x"),
    msgpack.ExtType(1, b""), msgpack.ExtType(1, b"\xc8\x01\x00\x00\xff\xff\xff\xff"), msgpack.ExtType(1, b"\x00\xff\x00\x00"),
    msgpack.Timestamp(1, 1), "unavailable", "evaluate", 999_999_999,
)  # fmt: skip


def _deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def _group(fields: Any) -> dict[str, Any] | None:
    while isinstance(fields, dict):
        if "group_id" in fields:
            return fields
        fields = fields.get("prompt", fields.get("group"))
    return None


def _places(value: Any) -> Any:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from _places(inner)


class Fuzz:
    def __init__(self, run: Run, bus: Bus, seed: int) -> None:
        self._run = run
        self._bus = bus
        self._hostile = Hostile(seed)
        self._honest: dict[Stream, list[dict[bytes, bytes]]] = {stream: [] for stream in (*DATA, *BROADCAST)}
        self._sent: set[tuple[Stream, bytes]] = set()
        self.by_stream: Counter[str] = Counter()

    async def harvest(self) -> None:
        for stream, kept in self._honest.items():
            for entry, fields in await raw(self._bus).xrange(self._bus.keys.of(stream), count=20):
                if (stream, entry) not in self._sent and fields.get(b"data"):  # else it is in `payloads`
                    kept.append(dict(fields))
            del kept[:-40]
        journal = await with_payloads(self._bus, await self._bus.xrange(streams.JOURNAL, count=20))
        self._honest[streams.EXPERIENCE] += [{b"id": f[b"id"], b"data": f[b"data"]} for _, f in journal if b"data" in f]
        records = await raw(self._bus).hgetall(self._bus.keys.named("policies"))
        self._honest[streams.PUBLISHED] += [
            {b"id": version, b"data": data} for version, data in list(records.items())[-5:]
        ]

    def _known(self, stream: Stream) -> list[dict[bytes, bytes]]:
        made = {"prompts": builders.prompt(0), "rollouts": builders.group(0), "experience": builders.experience(0)}
        kinds = {"eval_prompts": "prompts", "eval_rollouts": "rollouts", "eval_results": "experience"}
        example = made.get(kinds.get(stream.name, stream.name), builders.experience(0))
        number = str(FOREIGN - 1).encode()  # an example of no honest group
        return self._honest[stream] or [{b"id": number, b"data": wire.encode(example)}]

    async def feed(self, messages: int) -> None:
        while sum(self.by_stream.values()) < messages:
            await self.harvest()
            for stream in (*DATA, *BROADCAST):
                others = [fields for other in DATA if other is not stream for fields in self._known(other)]
                for _ in range(AT_ONCE):
                    fields = self._hostile.entry(self._hostile.random.choice(self._known(stream)), others)
                    if stream is streams.STEPS and _is_report(fields):
                        continue
                    entry = await raw(self._bus).xadd(self._bus.keys.of(stream), fields)
                    self._sent.add((stream, entry))
                    self.by_stream[stream.name] += 1
            await self._harm_keys()
            await self._run.until(self._is_taken)

    async def _harm_keys(self) -> None:
        keys, client, chance = self._bus.keys, raw(self._bus), self._hostile.random
        nonsense = chance.choice(
            (b"", b"{", b"[[[]]]", b"null", b"\xff\xfe", b"1e999", b'{"version": []}', b"[" * 3000)
        )
        for key in (keys.named("cordons"), keys.named("operations"), keys.named("exports"), keys.named("rehearsal")):
            await client.hset(key, mapping={b"7777": nonsense, b"\xff": nonsense})
        await client.hset(keys.named("cordons"), "rollout-0", nonsense)
        await client.sadd(keys.named("services"), b"\xff", "stranger")
        await client.set(keys.named("service:stranger"), nonsense)
        await client.hset(keys.named("live"), mapping={"revision": chance.choice((b"-1", b"x", b"7")), "7": nonsense})

    async def _is_taken(self) -> bool:
        lengths = [await self._bus.length(stream) for stream in (streams.PROMPTS, streams.ROLLOUTS, streams.EXPERIENCE)]
        return max(lengths) < 2 * AT_ONCE

    async def gone(self) -> bool:
        for stream in (*streams.TRAINING_STREAMS, streams.PUBLISHED):
            rows = await raw(self._bus).xrange(self._bus.keys.of(stream))
            if any((stream, entry) in self._sent for entry, _ in rows):
                return False
        return True


def _is_report(fields: Mapping[bytes, bytes]) -> bool:
    """Whether the guards would believe this forged report."""
    try:
        wire.decode(fields.get(b"data", b""), StepReport)
    except MessageError:
        return False
    return True


async def fuzz(folder: Path, seed: int, messages: int) -> Figures:
    async with running(folder, flags=FLAGS) as run:
        bus = await run.connect()
        await run.more_steps(bus, 3)
        feeder = Fuzz(run, bus, seed)
        await feeder.feed(messages)
        await raw(bus).delete(bus.keys.named("live"))
        await run.until(feeder.gone)
        await run.more_steps(bus, 3)
        beats: list[Heartbeat] = []

        async def all_beat() -> bool:  # a busy machine may let one lapse
            beats[:] = await heartbeats(bus)
            return {beat.service for beat in beats} == {"coordinator", "rollout", "reward", "trainer"}

        await run.until(all_beat)
        await bus.close()
        await run.stop()
    async with left_behind(run) as bus:
        return await audit(bus, feeder, seed, sum(beat.starts - 1 for beat in beats))


async def audit(bus: Bus, feeder: Fuzz, seed: int, restarts: int) -> Figures:
    """Account for every honest group by id, and for every entry by the counters."""
    status, counts = await Ledger(bus).status(), await bus.counts()
    endings: dict[bytes, list[str]] = {}
    for _, fields in await raw(bus).xrange(bus.keys.of(streams.AUDIT)):
        endings.setdefault(fields[b"id"], []).append(fields[b"outcome"].decode())
    honest = [str(number).encode() for number in range(status.cursor)]
    trained = Counter(name for name, outcomes in endings.items() for outcome in outcomes if outcome == "trained")
    ended = sum(count for name, count in counts.items() if name not in NO_ENDINGS)
    sent = sum(feeder.by_stream[stream.name] for stream in streams.TRAINING_STREAMS)
    return Figures(
        seed=seed,
        messages=sum(feeder.by_stream.values()),
        by_stream=dict(feeder.by_stream),
        steps=status.step,
        restarts=restarts,
        hostile_trained=sum(count for name, count in trained.items() if name not in set(honest)),
        trained_twice=sum(count > 1 for count in trained.values()),
        unaccounted=status.cursor + sent - ended,
        honest_lost=sum(not set(FINE) & set(endings.get(name, ())) for name in honest),
        honest_groups=len(honest),
    )
