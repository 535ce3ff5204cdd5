"""Functions and rubrics of verifiers as a scorer, in real processes."""

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.services.reward.scorers.function.rubric_call import states
from penstock.services.reward.scorers.function.trl_scorer import TrlFunctions
from penstock.shared.bus.messages import ChatMessage, FinishReason, Json, RolloutGroup, ScoreStatus
from penstock.shared.errors import SettingsError
from penstock.shared.settings.rewards.scorers import TrlScorer
from tests.support import builders, rubrics


@asynccontextmanager
async def scorer(*names: str, **more: object) -> AsyncIterator[TrlFunctions]:
    functions = [f"{rubrics.__name__}:{name}" for name in names]
    of = TrlScorer.model_validate({"kind": "verifiers", "functions": functions} | more)
    started = TrlFunctions(of, "answer", 100)
    try:
        await started.start()
        yield started
    finally:
        await started.close()


def chat(*texts: str) -> RolloutGroup:
    made = builders.group(0, texts)
    prompt = dataclasses.replace(made.prompt, text=None, messages=(ChatMessage("user", "12+34="),))
    cut = dataclasses.replace(made.samples[-1], finish_reason=FinishReason.LENGTH)
    return dataclasses.replace(made, prompt=prompt, samples=(*made.samples[:-1], cut))


TEXTS = ("so 46", "46", "so 46", "47")
VALUES = [1 + 0.5 / 3 + 0.25 / 2, 1 + 0.5 / 2 + 0.25 / 4, 1 + 0.5 / 3 + 0.25 / 2, 0.5 / 2 + 0.25 / 4]
"""Correct, brief (level 1) and the share of equal completions, by hand."""


@pytest.mark.parametrize("group", [builders.group(0, TEXTS), chat(*TEXTS)], ids=["text", "chat"])
async def test_a_rubric_is_the_weighted_sum_of_its_functions(group: RolloutGroup) -> None:
    async with scorer("rubric") as started:
        scores = await started.score(group)
    assert [score.value for score in scores] == pytest.approx(VALUES)
    assert [score.status for score in scores] == [ScoreStatus.OK] * 4
    assert scores[0].detail.startswith("correct=1.0, brief=0.333")
    assert scores[0].parts["correct"] == 1.0
    assert scores[0].parts["brief"] == pytest.approx(1 / 3, rel=1e-5)  # six digits


async def test_rubrics_and_functions_add_up_with_their_weights() -> None:
    async with scorer("group", "made(turn_weight=1.0)", "brief", weights=[1, 1, 4]) as started:
        values = [score.value for score in await started.score(chat(*TEXTS))]
    turns, brief = [1, 1, 1, 2], [1 / 3, 1 / 2, 1 / 3, 1 / 2]
    expected = [3 * value + 3 * turn + 4 * short for value, turn, short in zip(VALUES, turns, brief, strict=True)]
    assert values == pytest.approx(expected)


async def test_a_function_that_raises_is_unavailable_never_zero() -> None:
    async with scorer("rubric", "fails") as started:
        scores = await started.score(builders.group(0, TEXTS))
    assert {(score.status, score.value) for score in scores} == {(ScoreStatus.UNAVAILABLE, None)}
    assert scores[0].detail.startswith("fails: ZeroDivisionError: no (rubrics.py:")


async def test_a_rubric_that_scores_by_its_own_method_is_refused() -> None:
    with pytest.raises(SettingsError, match="weighted sum of its functions, found its own score_rollout"):
        async with scorer("own"):
            pass


def test_a_state_has_the_row_and_information_written_as_json() -> None:
    made = builders.group(0, ("46",))
    extra: dict[str, Json] = {"level": 3, "info": '{"bonus": 2}'}
    (state,) = states(dataclasses.replace(made, prompt=dataclasses.replace(made.prompt, extra=extra)), "answer", 100)
    assert (state["answer"], state["level"], state["info"], state["prompt"]) == ("46", 3, {"bonus": 2}, "12+34=")
    assert rubrics.turns(state) == 3.0


def test_a_trajectory_has_every_turn_with_what_it_saw() -> None:
    (state,) = states(dataclasses.replace(builders.group(0, ("46",)), samples=(builders.episode(),)), "answer", 100)
    (question, first), (seen, second) = ((step["prompt"], step["completion"]) for step in state["trajectory"])
    assert (question, [message["role"] for message in first]) == (
        [{"role": "user", "content": "12+34="}],
        ["assistant"],
    )
    assert seen == [*question, *first, {"role": "tool", "name": "add", "content": "46"}]
    assert second == [{"role": "assistant", "content": "46"}]
    assert (state["prompt"], state["completion"]) == (question, [*seen[1:], *second])
    assert rubrics.turns(state) == 2.0


async def test_values_are_those_of_the_package() -> None:
    verifiers = pytest.importorskip("verifiers")
    group = chat(*TEXTS)
    rubric = verifiers.Rubric(
        funcs=list(rubrics.rubric.funcs), weights=list(rubrics.rubric.weights), parser=rubrics.Parser()
    )
    of_states = states(group, "answer", 100)
    await rubric.score_group(of_states)
    async with scorer("rubric") as started:
        values = [score.value for score in await started.score(group)]
    assert values == pytest.approx([state["reward"] for state in of_states])
