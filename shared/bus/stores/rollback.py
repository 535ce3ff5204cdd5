"""Take a run back to a version, in one transaction: the beginning of every rollback, whoever asks for it.

The coordinator asks for people and for the regression gate (``services.coordinator.policies.rollback``, which also sees every rollback
through), the trainer where the newest checkpoint is damaged and an older one is not (``services.trainer.rank0.resume``).
"""

import time
import uuid
from collections.abc import Iterable, Sequence

from shared.bus import streams, wire
from shared.bus.bus import Bus
from shared.bus.messages import Event, PolicyRecord, PolicyVersion
from shared.bus.server import Argument
from shared.bus.stores.ledger import Ledger, RunStatus

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
    keys = [bus.keys.run, bus.keys.policy_states, bus.keys.revoked, bus.keys.of(streams.JOURNAL), bus.keys.counts]
    keys += [bus.keys.marks, bus.keys.checkpoints, bus.keys.rollback, bus.keys.pins]
    keys += [bus.keys.of(streams.HISTORY), bus.keys.of(streams.EVENTS)]
    counts, mark = await bus.counts(), await ledger.mark(target.version)
    now_s, left = time.time(), descendants(records, target.version)
    sentence = f"rolling back to version {target.version}" + (f": {reason}" if reason else "")
    undone = 0 if mark is None else counts.get("trained", 0) - mark[0]
    detail = f"{sentence}; from step {status.step}: {len(left)} versions revoked, {undone} groups undone"
    begun = wire.encode(Event(now_s, SOURCE, "rollback begun", detail, {"target": int(target.version)}))
    newest = -1 if status.newest_version is None else status.newest_version
    arguments: list[Argument] = [newest, target.version, target.step, now_s, sentence, uuid.uuid4().hex[:12]]
    arguments += [begun, streams.EVENTS.max_entries or 0]
    return str((await bus.script("roll_back", keys, [*arguments, *left])).decode())
