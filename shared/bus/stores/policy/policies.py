"""The policy's versions: records, states, checkpoints, pins, releases."""

from enum import StrEnum

from shared.bus.bus import Bus
from shared.bus.encoding import wire
from shared.bus.keys import Key, key
from shared.bus.messages import PolicyRecord, PolicyVersion

POLICIES = key("policies", "hash", "the run's", "version → PolicyRecord")
POLICY_STATES = key("policy_states", "hash", "the run's", "version → published, live, retired or revoked")
CHECKPOINTS = key("checkpoints", "hash", "the run's", "version → folder or URI of its checkpoint, while it has one")
REVOKED = key("revoked", "set", "the run's", "versions whose samples must not be trained on")
MARKS = key("marks", "hash", "the run's", "version → groups trained and place in the dataset when it was committed")
PINS = key("pins", "set", "the run's", "versions whose checkpoints are kept")
RELEASED = key("released", "set", "the run's", "versions that people may use")


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

    async def policies(self) -> list[PolicyRecord]:
        """Return every version's record, oldest first."""
        raw = await self._bus.hgetall(POLICIES)
        return sorted((wire.decode(data, PolicyRecord) for data in raw.values()), key=lambda record: record.version)

    async def policy_states(self) -> dict[PolicyVersion, PolicyState]:
        raw = await self._bus.hgetall(POLICY_STATES)
        return {PolicyVersion(int(version)): PolicyState(state.decode()) for version, state in raw.items()}

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
