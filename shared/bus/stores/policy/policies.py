"""The policy's versions: records, states, checkpoints, pins, releases."""

import dataclasses
from collections.abc import AsyncGenerator, Iterable, Sequence
from enum import StrEnum

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import RUN, Key, key
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion

POLICIES = key("policies", "hash", "the run's", "version → PolicyRecord")
POLICY_STATES = key("policy_states", "hash", "the run's", "version → published, live, retired or revoked")
CHECKPOINTS = key("checkpoints", "hash", "the run's", "version → folder or URI of its checkpoint, while it has one")
REVOKED = key("revoked", "set", "the run's", "versions whose samples must not be trained on")
MARKS = key("marks", "hash", "the run's", "version → groups trained and place in the dataset when it was committed")
PINS = key("pins", "set", "the run's", "versions whose checkpoints are kept")
RELEASED = key("released", "set", "the run's", "versions that people may use")

_CHUNK, _LINEAGE, _HOLE = 500, 64, 1000
_PROBES_KEPT, _SKIPPED = 100, 16
"""Versions whose probes stay, and how many are looked at behind them."""


class PolicyState(StrEnum):
    """State of a version."""

    PUBLISHED = "published"
    LIVE = "live"
    RETIRED = "retired"
    REVOKED = "revoked"


class Policies:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def policy(self, version: PolicyVersion) -> PolicyRecord | None:
        data = await self._bus.hget(POLICIES, str(version))
        return None if data is None else wire.decode(data, PolicyRecord)

    async def policies(self, after: int = -1) -> list[PolicyRecord]:
        """Return the records of all versions after one, oldest first. Not for requests: it costs the whole history."""
        versions = sorted(version for name in await self._bus.ask("HKEYS", POLICIES) if (version := int(name)) > after)
        chunks = [versions[start : start + _CHUNK] for start in range(0, len(versions), _CHUNK)]
        return [record for chunk in chunks for record in await self.records(chunk)]

    async def records(self, versions: Sequence[int], count: int | None = None) -> list[PolicyRecord]:
        """Return the known ones of ``versions``, or the first ``count`` of them."""
        raw = await self._bus.hmget(POLICIES, *map(str, versions)) if versions else []
        return [wire.decode(data, PolicyRecord) for data in [data for data in raw if data is not None][:count]]

    async def page(self, after: int, count: int) -> list[PolicyRecord]:
        """Return up to ``count`` records after a version, oldest first."""
        newest, records, width = int((await self._bus.hget(RUN, "newest_version")) or -1), list[PolicyRecord](), count
        while after < newest and len(records) < count:
            end = min(newest, after + width)
            known = await self.records(range(after + 1, end + 1), count - len(records))
            after, width = end, count if known else _HOLE  # numbers that a lost bus may have used
            records += known
        return records

    async def lineage(self, version: int) -> AsyncGenerator[PolicyRecord]:
        """Yield a version and its recorded ancestors, newest first."""
        known: dict[int, PolicyRecord] = {}
        at: int | None = version
        while at is not None:
            if at not in known:
                chunk = await self.records(range(max(0, at - _LINEAGE), at + 1))
                known = {record.version: record for record in chunk}
            if at not in known:
                return
            yield known[at]
            at = known[at].parent

    async def policy_states(self, versions: Iterable[int] | None = None) -> dict[PolicyVersion, PolicyState]:
        """Return the states of ``versions``; None: of all."""
        if versions is None:
            raw = await self._bus.hgetall(POLICY_STATES)
        else:
            names = [str(version).encode() for version in versions]
            values = await self._bus.hmget(POLICY_STATES, *map(bytes.decode, names)) if names else []
            raw = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        return {PolicyVersion(int(version)): PolicyState(state.decode()) for version, state in raw.items()}

    async def drop_probe(self, live: PolicyVersion) -> None:
        """Drop the probe of the version that was live long before ``live``: 60 kB that no replica reads again.

        Also those just before it, in case a version was never promoted.
        """
        newest = live - _PROBES_KEPT
        for record in await self.records(range(max(0, newest - _SKIPPED), newest + 1)):
            if record.probe is not None:
                bare = wire.encode(dataclasses.replace(record, probe=None))
                await self._bus.write(POLICIES, "HSET", str(record.version), bare)

    async def checkpoints(self) -> dict[PolicyVersion, str]:
        """Return each checkpoint's folder or URI."""
        raw = await self._bus.hgetall(CHECKPOINTS)
        return {PolicyVersion(int(version)): folder.decode() for version, folder in raw.items()}

    async def pins(self) -> frozenset[PolicyVersion]:
        """Return versions with pinned checkpoints."""
        return await self._versions(PINS)

    async def released(self) -> frozenset[PolicyVersion]:
        """Return the versions released for use."""
        return await self._versions(RELEASED)

    async def pin(self, version: PolicyVersion, *, pinned: bool) -> bool:
        """Pin or unpin a checkpoint; return whether that changed."""
        return await self._mark(PINS, version, marked=pinned)

    async def release(self, version: PolicyVersion, *, released: bool) -> bool:
        """Release a version, or not; return whether that changed."""
        return await self._mark(RELEASED, version, marked=released)

    async def _mark(self, key: Key, version: PolicyVersion, *, marked: bool) -> bool:
        return bool(await self._bus.write(key, "SADD" if marked else "SREM", str(version)))

    async def _versions(self, key: Key) -> frozenset[PolicyVersion]:
        names = await self._bus.smembers(key)
        return frozenset(PolicyVersion(int(name)) for name in names)

    async def revoked(self) -> frozenset[PolicyVersion]:
        """Return versions that must not be trained on."""
        return await self._versions(REVOKED)

    async def mark(self, version: PolicyVersion) -> tuple[int, int] | None:
        """Return, as of the commit: groups trained, and the dataset place of the first untrained prompt."""
        mark = await self._bus.hget(MARKS, str(version))
        if mark is None:
            return None
        trained, position = (int(word) for word in mark.split())
        return trained, position

    async def restore_policy(self, record: PolicyRecord, trained: int, position: int) -> None:
        """Have an emptied bus know a version that has a checkpoint, with its mark; no effect if it is known."""
        version = str(record.version)
        await self._bus.write(MARKS, "HSETNX", version, f"{trained} {position}")
        await self._bus.write(POLICY_STATES, "HSETNX", version, PolicyState.RETIRED.value)
        await self._bus.write(POLICIES, "HSETNX", version, wire.encode(record))

    async def set_checkpoint(self, version: PolicyVersion, folder: str) -> None:
        """Note a checkpoint's folder or URI."""
        await self._bus.write(CHECKPOINTS, "HSET", str(version), folder)

    async def drop_checkpoint(self, place: str) -> None:
        """Forget a damaged checkpoint, even if pinned."""
        for version, where in (await self.checkpoints()).items():
            if where == place:
                await self._bus.write(CHECKPOINTS, "HDEL", str(version))

    async def forget_checkpoint(self, folder: str) -> bool:
        """Forget a checkpoint before its deletion; False if pinned or a rollback's target."""
        return bool(await self._bus.script("forget_checkpoint", folder=folder))
