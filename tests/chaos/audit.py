"""Invariants of any run.

::

    audit_groups      every admitted group ended once, and the counters agree with the audit
    audit_versions    the ledger is one tree without gaps, and only its versions were served or sampled from
    Watcher           observes the run: versions served, batches committed, entries delivered again
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import NO_ENDINGS
from penstock.shared.bus.messages import Experience, PolicyUpdate
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.stores.run.records import with_payloads
from penstock.shared.bus.streams import AUDIT, JOURNAL, POLICY, TRAINING_STREAMS
from tests.support.raw_redis import raw


async def audit_groups(bus: Bus) -> dict[str, int]:
    """Check that every group ended once, revived or discarded letters aside; return the counters."""
    status, counts = await Ledger(bus).status(), await bus.counts()
    rows = await raw(bus).xrange(bus.keys.of(AUDIT))
    endings: dict[int, list[str]] = {}
    for _, fields in rows:
        if fields[b"outcome"] != b"lost_sample":
            endings.setdefault(int(fields[b"id"]), []).append(fields[b"outcome"].decode())
    assert sorted(endings) == list(range(status.cursor)), "each admitted prompt ends"
    assert all(outcome.startswith("dead:") for outcomes in endings.values() for outcome in outcomes[:-1]), "… and once"
    lost = sum(fields[b"outcome"] == b"lost_sample" for _, fields in rows)
    assert lost == counts.get("lost_samples", 0), "every lost sample is counted"
    counted = Counter({name: count for name, count in counts.items() if name not in NO_ENDINGS})
    counted["trained"] += counted.pop("undone", 0)  # trained on an abandoned branch
    assert Counter(outcomes[-1] for outcomes in endings.values()) == +counted, "the counters say what the audit says"
    assert all(name.split(":")[0] in ("trained", "dropped", "dead") for name in counted)
    assert sum(counted.values()) == status.cursor, "endings, undone ones among them, add up to the cursor"
    assert [await bus.length(stream) for stream in TRAINING_STREAMS] == [0, 0, 0, 0]
    assert [key async for key in raw(bus).scan_iter(f"{bus.keys.named('assembly')}:*")] == [], "no part is left"
    assert await Ledger(bus).in_flight() == 0
    return counts


async def audit_versions(bus: Bus) -> None:
    """Check that no number is skipped or reused, and no version becomes the head twice."""
    records = await Ledger(bus).policies()
    assert [record.version for record in records] == list(range(len(records))), "no number is skipped or used twice"
    steps = {record.version: record.step for record in records}
    for record in records[1:]:
        assert record.parent is not None
        assert record.parent < record.version, "a parent is older than its child"
        assert record.step - steps[record.parent] in (0, 1), (
            "a version is one step after its parent, or its weights again"
        )
    promoted = [update.record.version for _, update in await bus.newest(POLICY, PolicyUpdate, 1000)]
    assert len(promoted) == len(set(promoted)), "each version becomes the head once"


def reward_means(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [float(json.loads(line)["reward_mean"]) for line in lines]


class Watcher:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.served: set[int] = set()
        self.batches: list[tuple[int, frozenset[int]]] = []
        """Commit time (server clock, ms) and versions of each group's tokens."""
        self.deliveries: dict[tuple[str, str], int] = {}
        self.revocations: list[tuple[int, frozenset[int]]] = []
        """Versions revoked since a server time."""
        self._seen = "-"

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator["Watcher"]:
        tasks = [asyncio.create_task(loop()) for loop in (self._read_journal, self._read_hands)]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def note_revoked(self) -> None:
        revoked = await Ledger(self._bus).revoked()
        seconds, microseconds = await self._bus.call(raw(self._bus).time)
        self.revocations.append((1000 * seconds + microseconds // 1000 + 1, frozenset(map(int, revoked))))

    async def audit(self) -> None:
        """Check that nothing unknown was served and nothing revoked trained."""
        known = {int(record.version) for record in await Ledger(self._bus).policies()}
        assert self.served <= known, f"served but not in the ledger: {sorted(self.served - known)}"
        for since_ms, revoked in self.revocations:
            late = [versions for at_ms, versions in self.batches if at_ms >= since_ms and versions & revoked]
            assert not late, f"trained after its version was revoked: {late[:3]}"

    @property
    def redone(self) -> int:
        return sum(times - 1 for times in self.deliveries.values())

    async def _read_journal(self) -> None:
        while True:
            rows = await self._bus.xrange(JOURNAL, self._seen, count=200)
            self._seen = f"({rows[-1][0]}" if rows else self._seen
            for entry, fields in await with_payloads(self._bus, rows):
                if b"data" not in fields:
                    continue  # a checkpoint took it meanwhile
                versions = frozenset(map(int, wire.decode(fields[b"data"], Experience).group.versions))
                self.batches.append((int(entry.partition("-")[0]), versions))
                self.served |= versions
            await asyncio.sleep(0.02)

    async def _read_hands(self) -> None:
        while True:
            for stream in TRAINING_STREAMS:
                rows = await self._bus.call(
                    lambda stream=stream: raw(self._bus).xpending_range(  # type: ignore[misc]
                        self._bus.keys.of(stream), stream.group, min="-", max="+", count=200
                    )
                )
                for row in rows:
                    name = (stream.name, row["message_id"].decode())
                    self.deliveries[name] = max(self.deliveries.get(name, 1), int(row["times_delivered"]))
            self.served |= {int(beat.version) for beat in await heartbeats(self._bus) if beat.version is not None}
            await asyncio.sleep(0.1)
