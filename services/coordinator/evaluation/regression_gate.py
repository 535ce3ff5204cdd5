"""Revoke a version whose held-out accuracy fell significantly, and roll back (docs/evaluation.md, "The gate").

Verdict and action are on the bus, so a restart acts once.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import Counter

from penstock.services.coordinator.evaluation.results import Evaluation, Evaluations
from penstock.services.coordinator.evaluation.statistics import Estimate, fall
from penstock.services.coordinator.operations.operations import StateConflict
from penstock.services.coordinator.policies.rollback import Rollbacks
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.bus.stores.policy.evaluations import decisions, note_decision
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState, RunStatus
from penstock.shared.process.telemetry import tell
from penstock.shared.settings.evaluation import EvaluationSettings, GateSettings

log = logging.getLogger(__name__)

GATE_FALLS = Counter(
    "penstock_coordinator_evaluation_gate_falls_total",
    "Versions whose accuracy fell, by action: tell, rollback, pause.",
    ["action"],
)
PASSED, FELL = "passed", "fell"
SOURCE = "gate"
MIN_PROBLEMS = 50
"""With fewer answered problems there is no verdict."""
MAX_ROLLBACKS = 2
"""Consecutive rollbacks before the run pauses."""


def with_verdict(evaluation: Evaluation, before: Sequence[Evaluation], gate: GateSettings) -> Evaluation:
    own = _estimate(evaluation)
    if own is None or evaluation.answered < MIN_PROBLEMS:
        return evaluation
    passed = [
        earlier
        for earlier in before
        if earlier.set == evaluation.set and earlier.gate == PASSED and earlier.version < evaluation.version
    ]
    if not passed:
        return dataclasses.replace(evaluation, gate=PASSED, gate_detail="the first: nothing to compare with")
    reference = max(passed, key=lambda earlier: (earlier.accuracy or 0, earlier.version))
    other = _estimate(reference)
    assert other is not None
    by = fall(other, own)
    detail = (
        f"accuracy {own.value:.4f} against {other.value:.4f} of version {reference.version}: a fall of {by.value:.4f} "
        f"(95 % interval {by.low:.4f} to {by.high:.4f})"
    )
    fell = by.value > gate.max_fall and by.low > 0
    return dataclasses.replace(evaluation, gate=FELL if fell else PASSED, gate_detail=detail)


async def target(evaluated: Sequence[Evaluation], ledger: Ledger) -> PolicyVersion | None:
    """Return the newest version that passed, or the nearest one that it came from, with a checkpoint."""
    newest = max((evaluation.version for evaluation in evaluated if evaluation.gate == PASSED), default=None)
    checkpoints = await ledger.checkpoints() if newest is not None else {}
    if newest is not None and checkpoints:
        async for record in ledger.lineage(newest):
            if record.version in checkpoints:
                return record.version
    return None


def _estimate(evaluation: Evaluation) -> Estimate | None:
    if evaluation.accuracy is None or evaluation.accuracy_low is None or evaluation.accuracy_high is None:
        return None
    return Estimate(evaluation.accuracy, evaluation.accuracy_low, evaluation.accuracy_high)


@dataclasses.dataclass(eq=False)
class RegressionGate:
    """Judge evaluations, and act on falls."""

    bus: Bus
    ledger: Ledger
    settings: EvaluationSettings
    rollbacks: Rollbacks
    changed: Callable[[], None]

    def __post_init__(self) -> None:
        self._evaluations = Evaluations(self.bus)

    async def judge(self, evaluation: Evaluation) -> Evaluation:
        if self.settings.gate.action == "off" or evaluation.set != self.settings.gated:
            return evaluation
        revoked = await self.ledger.revoked()
        before = [earlier for earlier in await self._evaluations.read() if earlier.version not in revoked]
        return with_verdict(evaluation, before, self.settings.gate)

    async def act(self, status: RunStatus, evaluated: Sequence[Evaluation]) -> bool:
        """Act once on the newest fall; return whether anything was done."""
        gate = self.settings.gate
        fallen = next((evaluation for evaluation in reversed(evaluated) if evaluation.gate == FELL), None)
        if gate.action == "off" or fallen is None or status.state is not RunState.RUNNING:
            return False
        done = await decisions(self.bus)
        if done.get(fallen.version) in ("tell", "pause"):
            return False
        if gate.action == "tell":
            await self._note(fallen, "tell", fallen.gate_detail)
            return True
        return await self._go_back(fallen, evaluated, done)

    async def _go_back(
        self, fallen: Evaluation, evaluated: Sequence[Evaluation], done: Mapping[PolicyVersion, str]
    ) -> bool:
        good = max((judged.version for judged in evaluated if judged.gate == PASSED), default=-1)
        before = [judged for judged, action in done.items() if action == "rollback" and good < judged < fallen.version]
        if len(before) >= MAX_ROLLBACKS:
            why = f"{len(before)} rollbacks in a row did not help"
            return await self._pause(fallen, why)
        goal = await target(evaluated, self.ledger)
        if goal is None:
            return await self._pause(fallen, "no version that passed, or that one came from, has a checkpoint")
        await note_decision(self.bus, fallen.version, "rollback")
        try:
            await self.rollbacks.begin(goal, _sentence(fallen))
        except StateConflict as error:  # a command came first; the next pass sees what remains
            log.info("gate waits", extra={"version": int(fallen.version), "reason": str(error)})
            return False
        await self._note(fallen, "rollback", f"{fallen.gate_detail}; back to version {goal}")
        return True

    async def _pause(self, fallen: Evaluation, why: str) -> bool:
        reason = f"{_sentence(fallen)}; {why}: resume, roll back, or change [evaluation.gate]"
        paused, _ = await self.ledger.transition(RunState.PAUSED, reason, [RunState.RUNNING])
        if paused:
            await self._note(fallen, "pause", f"{fallen.gate_detail}; {why}")
            self.changed()
        return paused

    async def _note(self, fallen: Evaluation, action: str, detail: str) -> None:
        await note_decision(self.bus, fallen.version, action)
        GATE_FALLS.labels(action).inc()
        log.warning("accuracy fell", extra={"version": int(fallen.version), "action": action, "detail": detail})
        await tell(self.bus, SOURCE, "accuracy fell", detail, version=int(fallen.version), action=action)


def _sentence(fallen: Evaluation) -> str:
    return f"gate: version {fallen.version} on {fallen.set}: {fallen.gate_detail}"
