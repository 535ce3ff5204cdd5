"""The policy's versions: their records, states, checkpoints, pins and releases. The base of the ledger, which commits
and promotes them.
"""

from enum import StrEnum

from shared.bus import wire
from shared.bus.bus import Bus
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
    """What a version is."""

    PUBLISHED = "published"
    LIVE = "live"
    RETIRED = "retired"
    REVOKED = "revoked"


class Policies:
    """The versions of one run's policy."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def policy(self, version: PolicyVersion) -> PolicyRecord | None:
        """Return a version's record."""
        data = await self._bus.hget(POLICIES, str(version))
        return None if data is None else wire.decode(data, PolicyRecord)

    async def policies(self) -> list[PolicyRecord]:
        """Return every version's record, oldest first."""
        raw = await self._bus.hgetall(POLICIES)
        return sorted((wire.decode(data, PolicyRecord) for data in raw.values()), key=lambda record: record.version)

    async def policy_states(self) -> dict[PolicyVersion, PolicyState]:
        """Return every version's state."""
        raw = await self._bus.hgetall(POLICY_STATES)
        return {PolicyVersion(int(version)): PolicyState(state.decode()) for version, state in raw.items()}

    async def checkpoints(self) -> dict[PolicyVersion, str]:
        """Return where the checkpoint of every version that has one is: a folder, or a URI."""
        raw = await self._bus.hgetall(CHECKPOINTS)
        return {PolicyVersion(int(version)): folder.decode() for version, folder in raw.items()}

    async def pins(self) -> frozenset[PolicyVersion]:
        """Return the versions whose checkpoints are kept from cleanup."""
        return await self._versions(PINS)

    async def released(self) -> frozenset[PolicyVersion]:
        """Return the versions that people may use."""
        return await self._versions(RELEASED)

    async def pin(self, version: PolicyVersion, *, pinned: bool) -> bool:
        """Keep a version's checkpoint from cleanup, or no longer; return whether that is new."""
        return await self._mark(PINS, version, marked=pinned)

    async def release(self, version: PolicyVersion, *, released: bool) -> bool:
        """Say that people may use a version, or no longer; return whether that is new."""
        return await self._mark(RELEASED, version, marked=released)

    async def _mark(self, key: Key, version: PolicyVersion, *, marked: bool) -> bool:
        return bool(await self._bus.write(key, "SADD" if marked else "SREM", str(version)))

    async def _versions(self, key: Key) -> frozenset[PolicyVersion]:
        names = await self._bus.smembers(key)
        return frozenset(PolicyVersion(int(name)) for name in names)

    async def revoked(self) -> frozenset[PolicyVersion]:
        """Return the versions whose samples must not be trained on."""
        return await self._versions(REVOKED)

    async def mark(self, version: PolicyVersion) -> tuple[int, int] | None:
        """Return what was so when ``version`` was committed: how many groups were trained, and the place in the
        dataset of the first prompt that was not.
        """
        mark = await self._bus.hget(MARKS, str(version))
        if mark is None:
            return None
        trained, position = (int(word) for word in mark.split())
        return trained, position

    async def set_checkpoint(self, version: PolicyVersion, folder: str) -> None:
        """Note that a version has a checkpoint, in a folder or under a URI."""
        await self._bus.write(CHECKPOINTS, "HSET", str(version), folder)

    async def drop_checkpoint(self, place: str) -> None:
        """Note that the checkpoint in a folder or under a URI is damaged: no version has it any more, pinned or not."""
        for version, where in (await self.checkpoints()).items():
            if where == place:
                await self._bus.write(CHECKPOINTS, "HDEL", str(version))

    async def forget_checkpoint(self, folder: str) -> bool:
        """Note that a checkpoint is about to be deleted; False where it has to stay (it is pinned, or a rollback goes
        back to it).
        """
        return bool(await self._bus.script("forget_checkpoint", folder=folder))
