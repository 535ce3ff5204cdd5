"""Rollback: return the run to an earlier version, under a new number.

::

    begin ── one script ──▶ loading ──▶ pulling ──▶ live
             │              │           └ the new version is the head; ends when every replica serves it,
             │              │             or one at the deadline
             │              └ the trainer loads the checkpoint and publishes it as a new child of the target
             └ atomically: the run pauses, later versions are revoked (their samples are fenced at the trainer's
               intake), their journal is undone, the trainer is shut out, step and dataset position are restored

A run that was running resumes once the version is live. The state is on the bus; any leader completes it.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping

from prometheus_client import Counter

from penstock.services.coordinator.operations.operations import OperationOutcome, Report, StateConflict
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Json, PolicyVersion
from penstock.shared.bus.stores.policy.ledger import ENDED, Ledger, RunState, RunStatus
from penstock.shared.bus.stores.policy.rollback import (
    OVER,
    ROLLED_BACK,
    SOURCE,
    Rollback,
    Stage,
    begin_rollback,
    current_rollback,
    steer_rollback,
)
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.stores.run.operations import Operation, OperationState
from penstock.shared.process.telemetry import tell

log = logging.getLogger(__name__)

ROLLBACKS = Counter("penstock_coordinator_rollbacks_total", "Rollbacks by how they ended: live, failed.", ["state"])
for _state in ("live", "failed"):
    ROLLBACKS.labels(_state)  # exported at 0, so that the first increase is visible
KIND = "rollback"
_LOOK_S, _POLL_S = 2.0, 0.1


def request(rollback: Rollback) -> dict[str, Json]:
    return {"version": rollback.target, "rollback": rollback.id}


@dataclasses.dataclass(eq=False)
class Rollbacks:
    bus: Bus
    ledger: Ledger
    deadline_s: float
    changed: Callable[[], None]
    operate: Callable[[Rollback], Awaitable[Operation]]
    has_replicas: bool = True

    # ---------------------------------------------------------------- begin

    async def begin(self, target: PolicyVersion, reason: str) -> Operation:
        """Raises Misfit: impossible; nothing was changed."""
        while True:
            if (rollback := await self.current()) is not None and rollback.stage not in OVER:
                if rollback.target == target:
                    return await self.operate(rollback)
                raise StateConflict(
                    f"a rollback to version {rollback.target} is in progress ({rollback.stage.value}): wait until it "
                    "is live"
                )
            stranded = rollback is not None and rollback.strands
            answer = await self._begin(target, reason, again=stranded)
            if answer == "ok":
                begun = await self.current()
                assert begun is not None
                self.changed()
                log.info("rollback begun", extra={"target": int(target), "revoked": begun.revoked})
                return await self.operate(begun)
            if answer not in ("moved", "busy"):
                raise StateConflict(await self._refusal(answer, target, again=stranded))

    async def _begin(self, target: PolicyVersion, reason: str, *, again: bool = False) -> str:
        status = await self.ledger.status()  # read first: a newer status implies a newer version
        record, revoked, checkpoints = await asyncio.gather(
            self.ledger.policy(target), self.ledger.revoked(), self.ledger.checkpoints()
        )
        if record is None or status.newest_version is None:
            known = "none yet" if status.newest_version is None else f"versions up to {status.newest_version}"
            raise StateConflict(f"this run has no policy version {target}; it has {known}")
        newest = None if again else status.tip
        if target in revoked:
            raise StateConflict(
                f"version {target} is revoked: a rollback left its branch; {_choices(checkpoints, revoked, newest)}"
            )
        if target == status.tip and not again:
            raise StateConflict(
                f"version {target} is the newest: roll back to an earlier one; {_choices(checkpoints, revoked, newest)}"
            )
        return await begin_rollback(self.bus, self.ledger, status, record, reason)

    async def _refusal(self, answer: str, target: PolicyVersion, *, again: bool) -> str:
        status, revoked, checkpoints = await asyncio.gather(
            self.ledger.status(), self.ledger.revoked(), self.ledger.checkpoints()
        )
        if answer == "no_checkpoint":
            newest = None if again else status.tip
            return (
                f"version {target} has no checkpoint; {_choices(checkpoints, revoked, newest)} "
                "(trainer.checkpoint_every_steps and trainer.keep_last set how many there are)"
            )
        state = answer.partition(":")[2]
        return f"expected a run that is running or paused, found it {state}"

    async def current(self) -> Rollback | None:
        return await current_rollback(self.bus)

    async def run(self) -> None:
        """Ensure that every rollback has its operation."""
        while True:
            rollback = await self.current()
            if rollback is not None and rollback.stage not in OVER:
                await self.operate(rollback)
            await asyncio.sleep(_LOOK_S)

    async def see_through(self, operation: Operation, report: Report) -> OperationOutcome:
        while (rollback := await self.advance()) is not None and rollback.id == operation.request["rollback"]:
            result: dict[str, Json] = {
                "version": rollback.version,
                "revoked": rollback.revoked,
                "undone": rollback.undone,
            }
            if rollback.stage is Stage.LIVE:
                return OperationOutcome(OperationState.SUCCEEDED, rollback.detail, result)
            if rollback.stage is Stage.FAILED:
                return OperationOutcome(OperationState.FAILED, rollback.detail, result)
            await report(rollback.stage, rollback.detail)
            await asyncio.sleep(_POLL_S)
        return OperationOutcome(OperationState.CANCELLED, "the bus no longer has it")

    async def keep_paused(self, reason: str) -> None:
        if (rollback := await self.current()) is not None:
            await steer_rollback(self.bus, rollback.id, resumes=0, pause_reason=reason)

    async def advance(self) -> Rollback | None:
        rollback = await self.current()
        if rollback is None or rollback.stage in OVER:
            return rollback
        status = await self.ledger.status()
        if status.state in ENDED:
            await self._end(rollback, Stage.FAILED, f"the run was {status.state.value}")
        elif rollback.unloadable:
            reason = f"rollback to version {rollback.target} failed: {rollback.unloadable}"
            await self.ledger.transition(RunState.PAUSED, reason, [RunState.PAUSED])
            await self._end(rollback, Stage.FAILED, rollback.unloadable)
        elif rollback.stage is Stage.LOADING and status.tip not in (None, rollback.target):
            await steer_rollback(
                self.bus, rollback.id, state=Stage.PULLING, version=status.tip or 0, detail="replicas pull the version"
            )
        elif rollback.stage is Stage.PULLING and rollback.version is not None:
            await self._wait_for_replicas(rollback, rollback.version, status)
        return await self.current()

    async def _wait_for_replicas(self, rollback: Rollback, version: PolicyVersion, status: RunStatus) -> None:
        if status.head is None or status.head < version:
            return
        beats = [beat for beat in await heartbeats(self.bus) if beat.service == "rollout"]
        behind = sorted(beat.replica for beat in beats if beat.version is None or beat.version < version)
        patient = time.time() - rollback.changed_at_s < self.deadline_s
        if (self.has_replicas and len(behind) == len(beats)) or (behind and patient):
            return
        why = rollback.reason.partition(": ")[2]
        reason = f"{ROLLED_BACK} {rollback.target}, as version {version}" + (f": {why}" if why else "")
        if rollback.pause_reason and not rollback.resumes:
            reason = f"{rollback.pause_reason}; {reason}"
        state = RunState.RUNNING if rollback.resumes else RunState.PAUSED
        await self.ledger.transition(state, reason, [RunState.PAUSED])
        await self._end(rollback, Stage.LIVE, f"behind still: {', '.join(behind)}" if behind else "")

    async def _end(self, rollback: Rollback, stage: Stage, detail: str) -> None:
        if not await steer_rollback(self.bus, rollback.id, state=stage, detail=detail):
            return
        self.changed()
        ROLLBACKS.labels(stage.value).inc()
        sentence = f"to version {rollback.target}: {detail}" if detail else f"to version {rollback.target}"
        log.info("rollback ended", extra={"target": int(rollback.target), "stage": stage.value, "detail": detail})
        await tell(self.bus, SOURCE, f"rollback {stage.value}", sentence, target=int(rollback.target))


def _choices(
    checkpoints: Mapping[PolicyVersion, str], revoked: Collection[PolicyVersion], newest: PolicyVersion | None
) -> str:
    usable: Collection[PolicyVersion] = sorted(v for v in checkpoints if v != newest and v not in revoked)
    return f"roll back to one of {', '.join(map(str, usable))}" if usable else "no earlier version has a checkpoint"
