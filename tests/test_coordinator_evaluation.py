"""Laws of held-out evaluation, on a real server."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from services.coordinator.evaluation import Description, Evaluation, Evaluator, evaluations, summarize
from services.coordinator.lifecycle import Due, due
from services.coordinator.service import load_data, make_evaluator
from shared import streams
from shared.bus import Bus
from shared.errors import PermanentError
from shared.ledger import Ledger, RunState, RunStatus
from shared.messages import Experience, PolicyVersion, Prompt, Purpose
from tests.conftest import until
from tests.coordinator_players import replicas, settings

V0 = PolicyVersion(0)


def evaluator(bus: Bus, folder: Path, **changed: object) -> Evaluator:
    run = settings(folder, heldout=6, evaluation=changed)
    heldout = load_data(run).heldout
    assert heldout is not None
    return make_evaluator(bus, Ledger(bus), heldout, run)


def first_four(prompt: Prompt) -> float:
    """Right on problems 0 to 3, whose answers are 0, 2, 4 and 6."""
    return 1.0 if int(prompt.answer or 0) < 8 else 0.0


async def is_clean(bus: Bus) -> bool:
    lengths = [await bus.length(s) for s in (streams.EVAL_PROMPTS, streams.EVAL_ROLLOUTS, streams.EVAL_RESULTS)]
    left = await bus.client.exists(bus.keys.evaluation, bus.keys.evaluation_answers)
    return lengths == [0, 0, 0] and left == 0


async def test_accuracy_is_the_share_of_rewards_above_the_threshold(bus: Bus, tmp_path: Path) -> None:
    async with replicas(bus, first_four):
        found = await evaluator(bus, tmp_path).evaluate(V0, 0, initial=True, final=False)
    assert found is not None
    assert (found.problems, found.answered, found.correct, found.accuracy) == (6, 6, 4, 4 / 6)
    assert (found.initial, found.final, found.note, found.oldest_version) == (True, False, "", 0)
    assert await evaluations(bus) == [found]
    assert await is_clean(bus)


async def test_problems_are_decoded_greedily_once_under_the_evaluated_version(bus: Bus, tmp_path: Path) -> None:
    task = asyncio.create_task(evaluator(bus, tmp_path).evaluate(PolicyVersion(3), 3, initial=False, final=True))
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
            await evaluator(bus, tmp_path).evaluate(PolicyVersion(version), version, initial=False, final=False)
    assert len(seen) == 6
    assert sorted(seen[:3]) == sorted(seen[3:])
    assert len(set(seen)) == 3


async def test_a_killed_evaluation_goes_on_and_counts_no_problem_twice(bus: Bus, tmp_path: Path) -> None:
    task = asyncio.create_task(evaluator(bus, tmp_path).evaluate(V0, 0, initial=True, final=False))
    await until(lambda: asked(bus, 6))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with replicas(bus, first_four):
        await until(lambda: results(bus, 6))
        held = await bus.read(streams.EVAL_RESULTS, Experience, "coordinator", 3, 0.1)  # taken by the killed process
        await bus.client.hset(bus.keys.evaluation_answers, held[0].group_id, "[1.0, 0, 0]")  # and one written down
        found = await evaluator(bus, tmp_path).evaluate(V0, 0, initial=True, final=False)
    assert found is not None
    assert (found.problems, found.answered, found.correct) == (6, 6, 4)
    assert await is_clean(bus)


async def results(bus: Bus, count: int) -> bool:
    return await bus.length(streams.EVAL_RESULTS) == count


async def test_a_version_is_not_evaluated_twice(bus: Bus, tmp_path: Path) -> None:
    async with replicas(bus, first_four):
        part = evaluator(bus, tmp_path)
        assert await part.evaluate(V0, 0, initial=True, final=False) is not None
        assert await part.evaluate(V0, 0, initial=True, final=False) is None
    assert len(await evaluations(bus)) == 1


async def test_dead_problems_do_not_hang_it_and_the_result_says_so(bus: Bus, tmp_path: Path) -> None:
    def reward(prompt: Prompt) -> float:
        if int(prompt.answer or 0) >= 8:
            raise PermanentError("the scorer is broken")
        return 1.0

    async with replicas(bus, reward):
        found = await evaluator(bus, tmp_path).evaluate(V0, 0, initial=True, final=False)
    assert found is not None
    assert (found.problems, found.answered, found.correct, found.accuracy) == (6, 4, 4, 1.0)
    assert found.note == "2 of 6 problems are without an answer"
    assert await bus.counts() == {}  # held-out problems are no groups of the run


async def test_at_its_deadline_it_reports_on_what_it_has(bus: Bus, tmp_path: Path) -> None:
    part = evaluator(bus, tmp_path, timeout_s=0.05)
    found = await part.evaluate(V0, 0, initial=True, final=False)
    assert found is not None
    assert (found.answered, found.accuracy, found.note) == (0, None, "6 of 6 problems are without an answer")
    assert await is_clean(bus)


async def test_a_stop_interrupts_it_and_leaves_nothing(bus: Bus, tmp_path: Path) -> None:
    ledger = Ledger(bus)
    await ledger.create()
    task = asyncio.create_task(evaluator(bus, tmp_path).evaluate(V0, 0, initial=True, final=False))
    await until(lambda: asked(bus, 6))
    await ledger.transition(RunState.STOPPED, "", [RunState.CREATED])
    assert await task is None
    assert await evaluations(bus) == []
    assert await is_clean(bus)


async def test_late_answers_of_another_evaluation_are_ignored(bus: Bus, tmp_path: Path) -> None:
    async with replicas(bus, first_four):
        part = evaluator(bus, tmp_path)
        await part.evaluate(V0, 0, initial=True, final=False)
        task = asyncio.create_task(part.evaluate(PolicyVersion(1), 1, initial=False, final=True))
        found = await task
    assert found is not None
    assert (found.version, found.answered, found.correct) == (1, 6, 4)


def test_the_summary_of_answers_is_worked_out_by_hand() -> None:
    description = Description(PolicyVersion(2), 2, 5, False, False, started_at_s=10.0)
    found = summarize(description, [(1.0, 2, 2), (0.5, 2, 3), (0.75, 3, 3), (0.0, 2, 2)], 0.5, now_s=12.5)
    assert found == Evaluation(
        version=PolicyVersion(2),
        step=2,
        problems=5,
        answered=4,
        correct=2,
        accuracy=0.5,
        initial=False,
        final=False,
        oldest_version=PolicyVersion(2),
        newest_version=PolicyVersion(3),
        started_at_s=10.0,
        seconds=2.5,
        note="1 of 5 problems are without an answer",
    )


RUNNING = RunStatus(
    state=RunState.RUNNING, reason="", created_at_s=0, changed_at_s=0, step=0, cursor=0, head=V0, newest_version=V0,
    trainer_epoch=1, shift=0, tip=None, first_admission_s=None, last_commit_s=None, paused_s=0,
)  # fmt: skip
INITIAL = summarize(Description(V0, 0, 1, True, False, 0.0), [(1.0, 0, 0)], 0.5, 1.0)


@pytest.mark.parametrize(
    ("changed", "head_step", "found", "expected"),
    [
        ({"head": None}, 0, [], None),
        ({"state": RunState.CREATED}, 0, [], Due(initial=True)),
        ({"state": RunState.RUNNING}, 0, [], Due(initial=True)),
        ({"state": RunState.STOPPED}, 0, [], None),
        ({}, 0, [INITIAL], None),
        ({"step": 5}, 5, [], None),  # a run that came back from a checkpoint has no initial policy to evaluate
        ({"step": 19, "head": 19}, 19, [INITIAL], None),
        ({"step": 20, "head": 20}, 20, [INITIAL], Due()),
        ({"step": 23, "head": 22}, 22, [INITIAL], Due()),
        ({"step": 20, "head": 20, "state": RunState.PAUSED}, 20, [INITIAL], None),
        ({"step": 21, "head": 21}, 21, [INITIAL, dataclasses.replace(INITIAL, step=20, version=PolicyVersion(20))], None),
        ({"step": 100, "head": 99, "newest_version": 100}, 99, [INITIAL], None),
        ({"step": 100, "head": 100, "newest_version": 100}, 100, [INITIAL], Due(final=True)),
        ({"step": 100, "head": 100, "newest_version": 100}, 100, [INITIAL, dataclasses.replace(INITIAL, version=PolicyVersion(100), step=100, final=True)], None),
    ],
)  # fmt: skip
def test_when_an_evaluation_is_due(
    changed: dict[str, object], head_step: int, found: list[Evaluation], expected: Due | None
) -> None:
    status = dataclasses.replace(RUNNING, **changed)  # type: ignore[arg-type]
    assert due(status, head_step, found, steps=100, every_steps=20) == expected
