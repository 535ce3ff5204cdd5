"""Rollbacks: begin one, in one transaction, and follow it until every replica serves the version.

The coordinator asks for people and for the regression gate (``services.coordinator.policies.rollback``, which also
sees every rollback through), the trainer where the newest checkpoint is damaged and an older one is not
(``services.trainer.rank0.resume``).
"""

import dataclasses
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from shared.bus import streams, wire
from shared.bus.bus import Bus
from shared.bus.keys import key
from shared.bus.messages import Event, PolicyRecord, PolicyVersion
from shared.bus.stores.ledger import Ledger, RunStatus

ROLLBACK = key("rollback", "hash", "until the next one", "the rollback under way, or the last one (`Rollback`)")
SOURCE = "rollback"
"""The source of a rollback's events."""


def descendants(records: Iterable[PolicyRecord], ancestor: PolicyVersion) -> list[PolicyVersion]:
    """Return every version that comes from ``ancestor``, oldest first, without itself.

    A parent is always older than its child, so one pass in the order of versions finds them all.
    """
    found = {ancestor}
    for record in sorted(records, key=lambda record: record.version):
        if record.parent in found:
            found.add(record.version)
    return sorted(found - {ancestor})


async def begin_rollback(
    bus: Bus, ledger: Ledger, status: RunStatus, records: Sequence[PolicyRecord], target: PolicyRecord, reason: str
) -> str:
    """Take the run back to ``target``, whose checkpoint the ledger knows.

    Args:
        bus: of the run.
        ledger: of the run.
        status: the run as it was read before ``records``: where it moves on, so does its newest version.
        records: every version.
        target: the version to go back to.
        reason: why; empty: not said.

    Returns:
        "ok", or why nothing was changed: "moved" (read again), "busy" (another rollback is under way), "no_checkpoint",
        "state:<state>" (the run is neither running nor paused).
    """
    counts, mark = await bus.counts(), await ledger.mark(target.version)
    now_s, left = time.time(), descendants(records, target.version)
    sentence = f"rolling back to version {target.version}" + (f": {reason}" if reason else "")
    undone = 0 if mark is None else counts.get("trained", 0) - mark[0]
    detail = f"{sentence}; from step {status.step}: {len(left)} versions revoked, {undone} groups undone"
    event = wire.encode(Event(now_s, SOURCE, "rollback begun", detail, {"target": int(target.version)}))
    begun = await bus.script(
        "roll_back", expected_newest=-1 if status.newest_version is None else status.newest_version,
        target=target.version, target_step=target.step, now_s=now_s, reason=sentence, id=uuid.uuid4().hex[:12],
        event=event, event_entries=streams.EVENTS.max_entries or 0, history_entries=streams.HISTORY.max_entries or 0,
        versions=left,
    )  # fmt: skip
    return str(begun.decode())


class Stage(StrEnum):
    """How far a rollback is."""

    LOADING = "loading"
    PULLING = "pulling"
    LIVE = "live"
    FAILED = "failed"


OVER = (Stage.LIVE, Stage.FAILED)


@dataclasses.dataclass(frozen=True, slots=True)
class Rollback:
    """One rollback."""

    id: str
    target: PolicyVersion
    stage: Stage
    reason: str
    from_step: int
    """The step at which the run was."""
    revoked: int
    """How many versions were revoked."""
    undone: int
    """How many groups were trained on the branch that was left."""
    resumes: bool
    """Whether the run goes on once the version is live: it was running."""
    version: PolicyVersion | None
    """The new version with the target's weights; None until the trainer has published it."""
    detail: str
    """What it waits for, or why it failed."""
    unloadable: str
    """Why the trainer cannot load the checkpoint; empty: it was not found so."""
    started_at_s: float
    changed_at_s: float

    @property
    def strands(self) -> bool:
        """Whether it left the run with nothing to go on from."""
        return self.stage is Stage.FAILED and bool(self.unloadable)


async def current_rollback(bus: Bus) -> Rollback | None:
    """Return the rollback under way, or the last one."""
    raw = await bus.hgetall(ROLLBACK)
    return _read({name.decode(): value.decode() for name, value in raw.items()}) if raw else None


async def steer_rollback(bus: Bus, rollback: str, **fields: str | int) -> bool:
    """Write fields of the rollback of this id; False where another has begun, or it has ended."""
    words = [word for pair in fields.items() for word in pair]
    return bool(await bus.script("steer_rollback", id=rollback, now_s=time.time(), fields=words))


async def count_load(bus: Bus) -> int:
    """Count that the trainer tries to load the checkpoint of the rollback under way; return how often it did."""
    return int(await bus.write(ROLLBACK, "HINCRBY", "loads", 1))


def _read(fields: Mapping[str, str]) -> Rollback:
    version = fields.get("version")
    return Rollback(
        id=fields["id"],
        target=PolicyVersion(int(fields["target"])),
        stage=Stage(fields["state"]),
        reason=fields["reason"],
        from_step=int(fields["from_step"]),
        revoked=int(fields["revoked"]),
        undone=int(fields["undone"]),
        resumes=fields["resumes"] == "1",
        version=None if version is None else PolicyVersion(int(version)),
        detail=fields.get("detail", "the trainer loads the checkpoint"),
        unloadable=fields.get("unloadable", ""),
        started_at_s=float(fields["started_at_s"]),
        changed_at_s=float(fields["changed_at_s"]),
    )
