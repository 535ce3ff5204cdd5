"""Laws of held-out evaluation."""

import asyncio
import dataclasses
from collections.abc import Awaitable
from pathlib import Path

import pytest

from penstock.services.coordinator.data import load_data
from penstock.services.coordinator.evaluation.evaluator import Due, Evaluator
from penstock.services.coordinator.evaluation.results import Evaluation, Evaluations, sentence, summarize
from penstock.services.coordinator.run.lifecycle import due
from penstock.services.coordinator.service import make_evaluator
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Experience, PolicyVersion, Prompt, Purpose
from penstock.shared.bus.stores.policy.evaluations import Description, EvaluationRequest
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState, RunStatus
from penstock.shared.errors import PermanentError
from penstock.shared.settings.evaluation import HeldOutSet
from tests.conftest import until
from tests.support.coordinator_players import replicas, settings
from tests.support.raw_redis import raw

V0 = PolicyVersion(0)
FIRST, BETWEEN, LAST = Due(("heldout",), initial=True), Due(("heldout",)), Due(("heldout",), final=True)


def evaluator(bus: Bus, folder: Path, **changed: object) -> Evaluator:
    run = settings(folder, heldout=6, evaluation=changed)
    return make_evaluator(bus, Ledger(bus), load_data(run).held_out, run, unjudged)


async def unjudged(evaluation: Evaluation) -> Evaluation:
    return evaluation


async def alone(evaluating: Awaitable[list[Evaluation] | None]) -> Evaluation:
    evaluation = await evaluating
    assert evaluation is not None
    (only,) = evaluation
    return only


def first_four(prompt: Prompt) -> float:
    """Right on problems 0 to 3 (answers 0, 2, 4, 6)."""
    return 1.0 if int(prompt.answer or 0) < 8 else 0.0


async def is_clean(bus: Bus) -> bool:
    lengths = [await bus.length(s) for s in (streams.EVAL_PROMPTS, streams.EVAL_ROLLOUTS, streams.EVAL_RESULTS)]
    left = await raw(bus).exists(bus.keys.named("evaluation"), bus.keys.named("evaluation_answers"))
    return lengths == [0, 0, 0] and left == 0


async def test_accuracy_is_the_share_of_rewards_above_the_threshold(bus: Bus, tmp_path: Path) -> None:
    async with replicas(bus, first_four):
        evaluation = await alone(evaluator(bus, tmp_path).evaluate(V0, 0, FIRST))
    assert (evaluation.problems, evaluation.answered, evaluation.correct, evaluation.accuracy) == (6, 6, 4, 4 / 6)
    assert (evaluation.initial, evaluation.final, evaluation.note, evaluation.set) == (True, False, "", "heldout")
    assert await Evaluations(bus).read() == [evaluation]
    assert await is_clean(bus)
    all_right = dataclasses.replace(evaluation, accuracy=1.0)
    assert "counts as correct" not in sentence(evaluation)
    assert sentence(all_right).endswith("every answer counts as correct (evaluation.correct_above)")


async def test_problems_are_decoded_greedily_once_under_the_evaluated_version(bus: Bus, tmp_path: Path) -> None:
    task = asyncio.create_task(evaluator(bus, tmp_path).evaluate(PolicyVersion(3), 3, LAST))
    await until(lambda: asked(bus, 6))
    _, prompt = (await bus.newest(streams.EVAL_PROMPTS, Prompt, 1))[0]
    assert (prompt.sampling.samples, prompt.sampling.temperature, prompt.sampling.max_new_tokens) == (1, 0.0, 4)
    assert (prompt.purpose, prompt.min_version) == (Purpose.EVALUATE, 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def asked(bus: Bus, count: int) -> bool:
    return await bus.length(streams.EVAL_PROMPTS) == count


async def test_an_evaluation_between_takes_the_same_fixed_subset_each_time(bus: Bus, tmp_path: Path) -> None:
    seen: list[str] = []

    def reward(prompt: Prompt) -> float:
        seen.append(prompt.problem)
        return 0.0

    async with replicas(bus, reward):
        for version in (1, 2):
            await evaluator(bus, tmp_path).evaluate(PolicyVersion(version), version, BETWEEN)
    assert len(seen) == 6
    assert sorted(seen[:3]) == sorted(seen[3:])
    assert len(set(seen)) == 3


async def test_a_killed_evaluation_goes_on_and_counts_no_problem_twice(bus: Bus, tmp_path: Path) -> None:
    task = asyncio.create_task(evaluator(bus, tmp_path).evaluate(V0, 0, FIRST))
    await until(lambda: asked(bus, 6))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with replicas(bus, first_four):
        await until(lambda: results(bus, 6))
        held = await bus.read(streams.EVAL_RESULTS, Experience, "coordinator", 3, 0.1)  # taken by the killed process
        await raw(bus).hset(bus.keys.named("evaluation_answers"), held[0].group_id, "1")  # and one written down
        evaluation = await alone(evaluator(bus, tmp_path).evaluate(V0, 0, FIRST))
    assert (evaluation.problems, evaluation.answered, evaluation.correct) == (6, 6, 4)
    assert await is_clean(bus)


async def results(bus: Bus, count: int) -> bool:
    return await bus.length(streams.EVAL_RESULTS) == count


async def test_a_version_is_not_evaluated_twice(bus: Bus, tmp_path: Path) -> None:
    async with replicas(bus, first_four):
        part = evaluator(bus, tmp_path)
        assert await part.evaluate(V0, 0, FIRST) is not None
        assert await part.evaluate(V0, 0, FIRST) is None
    assert len(await Evaluations(bus).read()) == 1


async def test_dead_problems_do_not_hang_it_and_the_result_says_so(bus: Bus, tmp_path: Path) -> None:
    def reward(prompt: Prompt) -> float:
        if int(prompt.answer or 0) >= 8:
            raise PermanentError("the scorer is broken")
        return 1.0

    async with replicas(bus, reward):
        evaluation = await alone(evaluator(bus, tmp_path).evaluate(V0, 0, FIRST))
    assert (evaluation.problems, evaluation.answered, evaluation.correct, evaluation.accuracy) == (6, 4, 4, 1.0)
    assert evaluation.note == "2 of 6 problems are without an answer"
    assert await bus.counts() == {}  # held-out problems are no groups of the run


async def test_at_its_deadline_it_reports_on_what_it_has(bus: Bus, tmp_path: Path) -> None:
    part = evaluator(bus, tmp_path, timeout_s=0.05)
    evaluation = await alone(part.evaluate(V0, 0, FIRST))
    assert (evaluation.answered, evaluation.accuracy, evaluation.note) == (
        0,
        None,
        "6 of 6 problems are without an answer after 0.05 s",
    )
    assert await is_clean(bus)


async def test_a_stop_interrupts_it_and_leaves_nothing(bus: Bus, tmp_path: Path) -> None:
    ledger = Ledger(bus)
    await ledger.create()
    task = asyncio.create_task(evaluator(bus, tmp_path).evaluate(V0, 0, FIRST))
    await until(lambda: asked(bus, 6))
    await ledger.transition(RunState.STOPPED, "", [RunState.CREATED])
    assert await task is None
    assert await Evaluations(bus).read() == []
    assert await is_clean(bus)


async def test_late_answers_of_another_evaluation_are_ignored(bus: Bus, tmp_path: Path) -> None:
    async with replicas(bus, first_four):
        part = evaluator(bus, tmp_path)
        await part.evaluate(V0, 0, FIRST)
        evaluation = await alone(part.evaluate(PolicyVersion(1), 1, LAST))
    assert (evaluation.version, evaluation.answered, evaluation.correct) == (1, 6, 4)


ASKED = EvaluationRequest("heldout", 1, 1, 0.5, ())


def test_the_summary_of_answers_is_worked_out_by_hand() -> None:
    sets = (EvaluationRequest("hard", 4, 4, 0.5, (2,)), EvaluationRequest("easy", 2, 1, 0.5, ()))
    description = Description(PolicyVersion(2), 2, sets, False, False, started_at_s=10.0)
    hard, easy = summarize(description, {0: 1, 1: 4, 3: 1, 4: 1}, "after 9 s", now_s=12.5)
    assert (hard.set, hard.problems, hard.samples, hard.answered, hard.correct) == ("hard", 4, 4, 3, 6)
    assert (hard.accuracy, hard.note) == (0.5, "1 of 4 problems are without an answer after 9 s")
    assert hard.pass_at["2"].value == pytest.approx((0.5 + 1.0 + 0.5) / 3)
    assert (easy.set, easy.problems, easy.answered, easy.correct, easy.accuracy) == ("easy", 2, 1, 1, 1.0)
    assert (easy.note, easy.seconds) == ("1 of 2 problems are without an answer after 9 s", 2.5)
    assert description.set_of(3).set == "hard"
    assert description.set_of(4).set == "easy"


RUNNING = RunStatus(
    state=RunState.RUNNING, reason="", created_at_s=0, changed_at_s=0, step=0, cursor=0, head=V0, newest_version=V0,
    trainer_epoch=1, shift=0, tip=None, first_admission_s=None, last_commit_s=None, paused_s=0,
)  # fmt: skip
INITIAL = summarize(Description(V0, 0, (ASKED,), True, False, 0.0), {0: 1}, "", 1.0)[0]
SETS = [HeldOutSet(path="heldout.jsonl", every_steps=20)]


@pytest.mark.parametrize(
    ("changed", "head_step", "evaluations", "expected"),
    [
        ({"head": None}, 0, [], None),
        ({"state": RunState.CREATED}, 0, [], FIRST),
        ({"state": RunState.RUNNING}, 0, [], FIRST),
        ({"state": RunState.STOPPED}, 0, [], None),
        ({}, 0, [INITIAL], None),
        ({"step": 5}, 5, [], None),  # a run restored from a checkpoint has no initial policy to evaluate
        ({"step": 19, "head": 19}, 19, [INITIAL], None),
        ({"step": 20, "head": 20}, 20, [INITIAL], BETWEEN),
        ({"step": 23, "head": 22}, 22, [INITIAL], BETWEEN),
        ({"step": 20, "head": 20, "state": RunState.PAUSED}, 20, [INITIAL], None),
        ({"step": 21, "head": 21}, 21, [INITIAL, dataclasses.replace(INITIAL, step=20, version=PolicyVersion(20))], None),
        ({"step": 100, "head": 99, "newest_version": 100}, 99, [INITIAL], None),
        ({"step": 100, "head": 100, "newest_version": 100}, 100, [INITIAL], LAST),
        ({"step": 100, "head": 100, "newest_version": 100}, 100, [INITIAL, dataclasses.replace(INITIAL, version=PolicyVersion(100), step=100, final=True)], None),
    ],
)  # fmt: skip
def test_when_an_evaluation_is_due(
    changed: dict[str, object], head_step: int, evaluations: list[Evaluation], expected: Due | None
) -> None:
    status = dataclasses.replace(RUNNING, **changed)  # type: ignore[arg-type]
    assert due(status, head_step, evaluations, steps=100, sets=SETS) == expected
