"""Run commands and the wait for a pause or drain."""

import asyncio
import dataclasses
from collections.abc import Callable

from penstock.services.coordinator.operations.operations import OperationOutcome, Report, StateConflict
from penstock.services.coordinator.policies.rollback import Rollbacks
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.policy.rollback import ON_REQUEST, OVER
from penstock.shared.bus.stores.replicas.cordon import Word, cordons
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.stores.run.operations import Operation, OperationState
from penstock.shared.process.telemetry import tell

_LOOK_S = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class SteeringCommand:
    to: RunState
    allowed: tuple[RunState, ...]
    refusals: dict[RunState, str]


_OVER = {
    RunState.STOPPED: "the run was stopped; start a new one",
    RunState.FINISHED: "the run has finished; start a new one, or extend it: start its services again with a larger run.steps",
}
ORDERS = {
    "start": SteeringCommand(
        RunState.RUNNING, (RunState.CREATED,), {**_OVER, RunState.PAUSED: "the run is paused: POST /v1/run/resume"}
    ),
    "pause": SteeringCommand(
        RunState.PAUSED,
        (RunState.RUNNING,),
        {**_OVER, RunState.CREATED: "the run has not started; there is nothing to pause"},
    ),
    "resume": SteeringCommand(
        RunState.RUNNING,
        (RunState.PAUSED,),
        {**_OVER, RunState.CREATED: "the run has not started; POST /v1/run/start"},
    ),
    "stop": SteeringCommand(RunState.STOPPED, (RunState.CREATED, RunState.RUNNING, RunState.PAUSED), _OVER),
}


@dataclasses.dataclass(eq=False)
class Steering:
    bus: Bus
    ledger: Ledger
    rollbacks: Rollbacks
    groups_per_step: int
    changed: Callable[[], None]

    async def command(self, name: str, reason: str) -> tuple[bool, RunState, str]:
        """Start, pause, resume or stop; return whether that changed the run, its state and reason."""
        order = ORDERS[name]
        if name == "pause" and reason:
            reason = f"{ON_REQUEST}: {reason}"
        reason = reason or ON_REQUEST
        await self._mind_rollback(name, reason)
        changed, state = await self.ledger.transition(order.to, reason, order.allowed)
        if not changed and state is not order.to:
            raise StateConflict(f"cannot {name} a run that is {state.value}: {order.refusals[state]}")
        if changed:
            self.changed()
            event = "resumed" if order.to is RunState.RUNNING else order.to.value
            await tell(self.bus, "api", f"run {event}", reason)
        return changed, order.to, (await self.ledger.status()).reason

    async def _mind_rollback(self, command: str, reason: str) -> None:
        """During a rollback, refuse to resume; a pause outlasts it."""
        if command == "pause":
            await self.rollbacks.keep_paused(reason)
        rollback = await self.rollbacks.current() if command == "resume" else None
        if rollback is not None and rollback.stage not in OVER:
            raise StateConflict(
                f"cannot resume while a rollback to version {rollback.target} is in progress "
                f"({rollback.stage.value}): wait until it is live"
            )
        if rollback is not None and rollback.strands:
            raise StateConflict(
                f"cannot resume: the rollback to version {rollback.target} failed: roll back to "
                "another version, or to this one again"
            )

    async def drain_run(self, operation: Operation, report: Report) -> OperationOutcome:
        """Wait until a paused run has less than a step in flight."""
        while True:
            status = await self.ledger.status()
            if status.state is not RunState.PAUSED:
                return OperationOutcome(
                    OperationState.CANCELLED, f"the run is {status.state.value} again: {status.reason}"
                )
            *drawn, waiting = [await self.bus.length(stream) for stream in streams.TRAINING_STREAMS]
            if sum(drawn) == 0 and waiting < self.groups_per_step:
                detail = f"nothing is generated or scored; {waiting} groups wait for the next step"
                step = (await self.ledger.status()).step  # the last may just have been committed
                return OperationOutcome(OperationState.SUCCEEDED, detail, {"step": step, "groups_waiting": waiting})
            await report("draining", f"{await self.ledger.in_flight()} groups in flight")
            await asyncio.sleep(_LOOK_S)

    async def drain_replica(self, operation: Operation, report: Report) -> OperationOutcome:
        replica, first_s = str(operation.request["replica"]), operation.created_at_s
        while True:
            beats = [beat for beat in await heartbeats(self.bus) if beat.replica == replica]
            if not beats or beats[0].started_at_s > first_s:
                return OperationOutcome(OperationState.SUCCEEDED, f"{replica} left")
            if (await cordons(self.bus)).get(replica) is not Word.DRAINING and beats[0].state != "stopping":
                return OperationOutcome(OperationState.CANCELLED, f"{replica} was ordered to stay")
            held = int(beats[0].values.get("held", 0))
            await report("finishing", f"{replica} holds {held} entries")
            await asyncio.sleep(_LOOK_S)
