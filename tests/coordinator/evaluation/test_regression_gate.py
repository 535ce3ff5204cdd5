"""Laws of the gate: a fall is rolled back, noise is not, repeated falls pause the run."""

import dataclasses
from pathlib import Path

import pytest

from penstock.services.coordinator.evaluation import regression_gate
from penstock.services.coordinator.evaluation.regression_gate import FELL, PASSED, target, with_verdict
from penstock.services.coordinator.evaluation.results import Evaluation, Evaluations, summarize
from penstock.services.coordinator.service import Coordinator
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion, Prompt
from penstock.shared.bus.stores.policy.evaluations import Description, EvaluationRequest
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.policy.policies import PolicyState
from penstock.shared.settings.evaluation import GateSettings
from tests.conftest import until
from tests.support.coordinator_players import Trainer, make, record, replicas, running, settings
from tests.support.raw_redis import raw

V = PolicyVersion
GATE = GateSettings(
    action="rollback",
    max_fall=0.05,
)


def evaluated(version: int, correct: int, problems: int = 100, gate: str = "") -> Evaluation:
    description = Description(
        V(version), version, (EvaluationRequest("heldout", problems, 1, 0.5, ()),), False, False, 0.0
    )
    answers = {problem: int(problem < correct) for problem in range(problems)}
    return dataclasses.replace(summarize(description, answers, "", 1.0)[0], gate=gate)


@pytest.mark.parametrize(
    ("correct", "problems", "expected"),
    [
        (80, 100, PASSED),
        (76, 100, PASSED),  # no more than max_fall
        (74, 100, PASSED),  # more, but 0.06 of 100 problems may be chance: −0.06 to 0.18
        (60, 100, FELL),  # 0.2, at least 0.07
        (37, 50, PASSED),
        (20, 49, ""),  # too few answers
    ],
)
def test_only_a_fall_that_is_large_and_real_fails(correct: int, problems: int, expected: str) -> None:
    assert with_verdict(evaluated(2, correct, problems), [evaluated(1, 80, gate=PASSED)], GATE).gate == expected


def test_the_reference_is_the_best_that_passed() -> None:
    before = [evaluated(1, 90, gate=PASSED), evaluated(2, 60, gate=PASSED), evaluated(3, 99, gate=FELL)]
    assert with_verdict(evaluated(4, 62), before, GATE).gate == FELL
    assert with_verdict(evaluated(4, 1), [], GATE).gate == PASSED, "the first has nothing to be compared with"


async def test_the_run_goes_back_to_the_newest_checkpoint_that_is_known_to_be_good(bus: Bus) -> None:
    ledger = Ledger(bus)
    for version in range(9):
        await ledger.restore_policy(record(version, version - 1 if version else None, version), 0, 0)

    async def goal(*checkpoints: int) -> int | None:
        for version in range(9):
            await ledger.drop_checkpoint(f"step-{version}")
        for version in checkpoints:
            await ledger.set_checkpoint(V(version), f"step-{version}")
        return await target(history, ledger)

    history = [evaluated(2, 80, gate=PASSED), evaluated(6, 81, gate=PASSED), evaluated(8, 20, gate=FELL)]
    assert await goal(1, 4, 7) == 4, "7 was trained after 6 and never evaluated"
    assert await goal(6, 4) == 6
    assert await goal(7) is None
    assert await goal() is None


class Policy:
    broken = False

    def reward(self, prompt: Prompt) -> float:
        return 0.0 if self.broken and prompt.purpose.value == "evaluate" else 1.0


async def _fell(bus: Bus, version: int) -> bool:
    return any(
        evaluation.version == version and evaluation.gate == FELL for evaluation in await Evaluations(bus).read()
    )


async def _evaluated(bus: Bus, version: int) -> bool:
    return any(evaluation.version == version for evaluation in await Evaluations(bus).read())


async def _head(bus: Bus, version: int) -> bool:
    return (await Ledger(bus).status()).head == version


async def _in(bus: Bus, state: RunState) -> bool:
    return (await Ledger(bus).status()).state is state


async def _until_evaluated(bus: Bus, trainer: Trainer, version: int) -> None:
    await trainer.step()
    await until(lambda: _head(bus, version))
    await until(lambda: _evaluated(bus, version))


@pytest.fixture(autouse=True)
def _few_problems(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "bus" in request.fixturenames:  # held-out sets of 20
        monkeypatch.setattr(regression_gate, "MIN_PROBLEMS", 10)


def gated(bus: Bus, folder: Path, **changed: object) -> Coordinator:
    gate = {"action": "rollback", **changed}
    evaluation = {"every_steps": 1, "problems": 20, "gate": gate}
    return make(bus, settings(folder, steps=50, heldout=20, evaluation=evaluation))


async def test_a_version_that_fell_is_revoked_and_the_run_goes_on_from_the_one_before(bus: Bus, tmp_path: Path) -> None:
    policy, ledger = Policy(), Ledger(bus)
    await ledger.create()
    async with running(gated(bus, tmp_path)), replicas(bus, policy.reward):
        trainer = await Trainer(bus).start()
        await until(lambda: _in(bus, RunState.RUNNING))
        await _until_evaluated(bus, trainer, 1)
        await ledger.set_checkpoint(V(1), "/checkpoints/step-000001")
        policy.broken = True
        await trainer.step()
        await until(lambda: _in(bus, RunState.PAUSED))
        status = await ledger.status()
        assert (status.tip, status.step) == (1, 1)
        assert status.reason.startswith(
            "rolling back to version 1: gate: version 2 on heldout: accuracy 0.0000 against"
        )
        assert (await ledger.policy_states())[V(2)] is PolicyState.REVOKED
        assert await raw(bus).hgetall(bus.keys.named("gate")) == {b"2": b"rollback"}


async def test_after_as_many_rollbacks_in_a_row_as_may_be_the_run_pauses(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regression_gate, "MAX_ROLLBACKS", 0)
    policy, ledger = Policy(), Ledger(bus)
    await ledger.create()
    async with running(gated(bus, tmp_path)), replicas(bus, policy.reward):
        trainer = await Trainer(bus).start()
        await until(lambda: _in(bus, RunState.RUNNING))
        await _until_evaluated(bus, trainer, 1)
        await ledger.set_checkpoint(V(1), "/checkpoints/step-000001")
        policy.broken = True
        await _until_evaluated(bus, trainer, 2)
        await until(lambda: _in(bus, RunState.PAUSED))
        status = await ledger.status()
        assert "0 rollbacks in a row did not help" in status.reason
        assert (status.tip, (await ledger.policy_states())[V(2)]) == (2, PolicyState.LIVE)
        await ledger.transition(RunState.RUNNING, "people know better", [RunState.PAUSED])
        await trainer.step()  # resumed by people: not paused again for this version
        await until(lambda: _fell(bus, 3))


async def test_without_a_checkpoint_that_is_known_to_be_good_the_run_pauses(bus: Bus, tmp_path: Path) -> None:
    policy, ledger = Policy(), Ledger(bus)
    await ledger.create()
    async with running(gated(bus, tmp_path)), replicas(bus, policy.reward):
        trainer = await Trainer(bus).start()
        await until(lambda: _in(bus, RunState.RUNNING))
        policy.broken = True
        await _until_evaluated(bus, trainer, 1)
        await ledger.set_checkpoint(V(1), "/checkpoints/step-000001")
        await until(lambda: _in(bus, RunState.PAUSED))
        assert "has a checkpoint" in (await ledger.status()).reason
