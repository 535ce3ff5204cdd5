"""Rollbacks: begin one atomically, and track it until every replica serves the version."""

import dataclasses
import time
import uuid
from collections.abc import Iterable
from enum import StrEnum

from pydantic import TypeAdapter

from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import key
from penstock.shared.bus.messages import Event, PolicyRecord, PolicyVersion
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState, RunStatus

ROLLBACK = key("rollback", "hash", "until the next one", "the rollback under way, or the last one (`Rollback`)")
SOURCE = "rollback"
ROLLING_BACK = "rolling back to version"
"""Start of the reason of the pause meanwhile."""
ROLLED_BACK = "rolled back to version"
ON_REQUEST = "on request"
"""Start of the reason of a command by HTTP, such as a pause, which outlasts a rollback."""


def descendants(records: Iterable[PolicyRecord], ancestor: PolicyVersion) -> list[PolicyVersion]:
    """Return all descendants of ``ancestor``, oldest first; parents are older than their children."""
    lineage = {ancestor}
    for record in sorted(records, key=lambda record: record.version):
        if record.parent in lineage:
            lineage.add(record.version)
    return sorted(lineage - {ancestor})


async def begin_rollback(bus: Bus, ledger: Ledger, status: RunStatus, target: PolicyRecord, reason: str) -> str:
    """Take the run back to ``target``.

    Returns:
        "ok", "moved" (read again), "busy" (another is under way), "no_checkpoint", or "state:<state>" (neither running nor paused).
    """
    counts, mark = await bus.counts(), await ledger.mark(target.version)
    revoked, branch = await ledger.revoked(), descendants(await ledger.policies(target.version), target.version)
    now_s, left = time.time(), [version for version in branch if version not in revoked]
    asked = status.reason if status.state is RunState.PAUSED and status.reason.startswith(ON_REQUEST) else ""
    sentence = f"{ROLLING_BACK} {target.version}" + (f": {reason}" if reason else "")
    undone = 0 if mark is None else counts.get("trained", 0) - mark[0]
    detail = f"{sentence}; from step {status.step}: {len(left)} versions revoked, {undone} groups undone"
    event = wire.encode(Event(now_s, SOURCE, "rollback begun", detail, {"target": int(target.version)}))
    begun = await bus.script(
        "roll_back", expected_newest=-1 if status.newest_version is None else status.newest_version,
        target=target.version, target_step=target.step, now_s=now_s, reason=sentence, id=uuid.uuid4().hex[:12],
        pause_reason=asked.partition(f"; {ROLLED_BACK}")[0], event=event, versions=left,
        event_entries=streams.EVENTS.max_entries or 0, history_entries=streams.HISTORY.max_entries or 0,
    )  # fmt: skip
    return str(begun.decode())


class Stage(StrEnum):
    LOADING = "loading"
    PULLING = "pulling"
    LIVE = "live"
    FAILED = "failed"


OVER = (Stage.LIVE, Stage.FAILED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    id: str
    target: PolicyVersion
    stage: Stage
    reason: str
    from_step: int
    revoked: int
    undone: int
    """Groups trained on the abandoned branch."""
    resumes: bool
    """Whether the run continues once the version is live."""
    pause_reason: str = ""
    """Of the pause meanwhile that keeps the run paused; or empty."""
    version: PolicyVersion | None = None
    """With the target's weights; None until published."""
    detail: str = "the trainer loads the checkpoint"
    """What it waits for, or why it failed."""
    unloadable: str = ""
    """Why the checkpoint cannot be loaded; or empty."""
    started_at_s: float
    changed_at_s: float

    @property
    def strands(self) -> bool:
        """Whether the run has nothing to continue from."""
        return self.stage is Stage.FAILED and bool(self.unloadable)


async def current_rollback(bus: Bus) -> Rollback | None:
    fields = {name.decode(): value.decode() for name, value in (await bus.hgetall(ROLLBACK)).items()}
    return _ROLLBACK.validate_python({**fields, "stage": fields["state"]}) if fields else None


async def steer_rollback(bus: Bus, rollback: str, **fields: str | int) -> bool:
    """Update this rollback; False if it is over."""
    words = [word for pair in fields.items() for word in pair]
    return bool(await bus.script("steer_rollback", id=rollback, now_s=time.time(), fields=words))


async def count_load(bus: Bus) -> int:
    """Count and return the trainer's attempts to load the checkpoint."""
    return int(await bus.write(ROLLBACK, "HINCRBY", "loads", 1))


_ROLLBACK = TypeAdapter(Rollback)
