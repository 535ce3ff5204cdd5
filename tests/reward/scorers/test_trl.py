"""TRL's reward functions as a scorer, with ``trl_functions`` and ``trl.rewards`` in real processes."""

import dataclasses
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from penstock.services.reward.scorers.function.trl_call import Notes, arguments, load_function
from penstock.services.reward.scorers.function.trl_scorer import TrlFunctions
from penstock.shared.bus.messages import ChatMessage, RolloutGroup, Score, ScoreStatus
from penstock.shared.errors import SettingsError
from penstock.shared.settings.rewards.scorers import TrlScorer
from tests.support import builders, trl_functions
from tests.support.overdue import hang_up

FUNCTIONS = trl_functions.__name__
FIVE = {
    "trl.rewards:accuracy_reward": 1.0,
    "trl.rewards:think_format_reward": 0.25,
    "trl.rewards:get_cosine_scaled_reward(max_len=100)": 0.5,
    "trl.rewards:get_repetition_penalty_reward(ngram_size=2, max_penalty=-0.5)": 2.0,
    "trl.rewards:get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)": 0.1,
}


@asynccontextmanager
async def scorer(*functions: str, **more: object) -> AsyncIterator[TrlFunctions]:
    names = [name if ":" in name else f"{FUNCTIONS}:{name}" for name in functions]
    started = TrlFunctions(TrlScorer.model_validate({"kind": "trl", "functions": names} | more), "answer", 100)
    try:
        await started.start()
        yield started
    finally:
        await started.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def obeying() -> AsyncIterator[TrlFunctions]:
    async with scorer("obey") as started:
        with pytest.MonkeyPatch.context() as patched:
            hang_up(started._processes, patched)
            yield started


def conversation(row: dict[str, object], number: int) -> RolloutGroup:
    """Return a recorded row: its prompt is a conversation, its tokens are counted in periods."""
    samples = row["samples"]
    assert isinstance(samples, list)
    group = builders.group(number, tuple(sample["text"] for sample in samples))
    prompt = dataclasses.replace(
        group.prompt,
        text=None,
        messages=(ChatMessage("user", str(row["prompt"])),),
        answer=None,
        extra={"solution": str(row["solution"])},
    )
    tokens = [np.arange(sample["tokens"], dtype=np.int32) % sample["period"] for sample in samples]
    return dataclasses.replace(
        group,
        prompt=prompt,
        samples=tuple(
            dataclasses.replace(sample, token_ids=ids, behavior_logprobs=np.zeros(len(ids), dtype=np.float32))
            for sample, ids in zip(group.samples, tokens, strict=True)
        ),
    )


async def test_five_functions_of_trl_give_200_completions_the_rewards_of_its_trainer() -> None:
    """The recorded rewards are those of GRPOTrainer._calculate_rewards, TRL 1.16, weighted and summed as there."""
    rows = json.loads((Path(trl_functions.__file__).parent / "trl_rewards.json").read_text())
    async with scorer(*FIVE, weights=list(FIVE.values()), environment=["HF_HOME"]) as started:
        scored = [await started.score(conversation(row, number)) for number, row in enumerate(rows)]
    values = [score.value for scores in scored for score in scores]
    assert len(values) == 200
    assert {score.status for scores in scored for score in scores} == {ScoreStatus.OK}
    expected = [reward for row in rows for reward in row["rewards"]]
    assert values == pytest.approx(expected, abs=1e-6)  # float32 sums in another order


async def test_a_function_that_returns_none_leaves_the_sum_of_the_others() -> None:
    async with scorer("unsure", "later", f"{FUNCTIONS}:scaled(factor=2.0)", weights=[1.0, 2.0, 0.5]) as started:
        scores = await started.score(builders.group(0, ("?", "four")))
    assert scores == [
        Score("trl", ScoreStatus.OK, 2.0, "unsure None; later 0.5; scaled 2", parts={"later": 0.5, "scaled": 2.0}),
        Score(
            "trl",
            ScoreStatus.OK,
            15.0,
            "unsure 10; later 0.5; scaled 8",
            parts={"unsure": 10.0, "later": 0.5, "scaled": 8.0},
        ),
    ]


async def test_functions_of_one_name_keep_their_own_values() -> None:
    async with scorer(f"{FUNCTIONS}:scaled(factor=2.0)", f"{FUNCTIONS}:scaled(factor=3.0)") as started:
        (score,) = await started.score(builders.group(0, ("four",)))
    assert score.parts == {"scaled": 8.0, "scaled_2": 12.0}


async def test_a_completion_without_any_reward_is_unavailable_not_0() -> None:
    async with scorer("unsure") as started:
        known, unknown = await started.score(builders.group(0, ("1", "?")))
    assert known == Score("trl", ScoreStatus.OK, 10.0)
    detail = "no function has a reward for completion 1: None from unsure"
    assert unknown == Score("trl", ScoreStatus.UNAVAILABLE, None, detail)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_function_that_fails_makes_the_group_unknown_and_is_named(obeying: TrlFunctions) -> None:
    texts = ("raise", "exit", "die", "nan", "short", "text", "hang")
    outcomes = [await obeying.score(builders.group(0, ("fine", text))) for text in texts]
    assert {score.status for scores in outcomes for score in scores} == {ScoreStatus.UNAVAILABLE}
    details = [re.sub(r" \(trl_functions\.py:\d+\)", "", scores[0].detail) for scores in outcomes]
    assert details == [
        "obey: ZeroDivisionError: no",
        "obey: SystemExit: 0",
        "obey: two processes died while they computed it",
        "obey: ValueError: expected a finite number or None for completion 1, found nan",
        "obey: ValueError: expected 2 rewards from the function, one per completion, found 1",
        "obey: TypeError: expected a number or None for completion 0, found str",
        "obey: no answer within 2 s (timeout_s)",
    ]
    fine = await obeying.score(builders.group(0, ("fine",)))
    assert [score.value for score in fine] == [4.0], "a failure costs no later group its score"


def test_functions_receive_what_trl_passes() -> None:
    group = builders.group(0, ("46", "47"), version=7)
    given = arguments(group, "solution", 100, Notes(2))
    state = given.pop("trainer_state")
    assert (state.global_step, state.max_steps) == (7, 100)  # type: ignore[attr-defined]
    assert [callable(given.pop(name)) for name in ("log_extra", "log_metric")] == [True, True]
    assert given == {
        "prompts": ["12+34=", "12+34="],
        "completions": ["46", "47"],
        "completion_ids": [[0, 1, 2], [1, 1, 2]],
        "solution": ["46", "46"],
        "level": [1, 1],
    }


def test_conversations_are_passed_as_messages() -> None:
    given = arguments(conversation({"prompt": "2+2", "solution": "4", "samples": [
        {"text": "5", "tokens": 2, "period": 9}]}, 0), "answer", 1, Notes(1))  # fmt: skip
    assert given["prompts"] == [[{"role": "user", "content": "2+2"}]]
    assert given["completions"] == [[{"role": "assistant", "content": "5"}]]
    assert given["solution"] == ["4"]
    assert "answer" not in given, "the dataset has no such column"


def test_of_several_turns_functions_receive_the_messages_of_trls_tool_loop() -> None:
    """Checked against ``GRPOTrainer._tool_call_loop``; ids of calls are in addition."""
    group = dataclasses.replace(builders.group(0, ("46",)), samples=(builders.episode(),))
    given = arguments(group, "answer", 1, Notes(1))
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 34}}}
    assert given["prompts"] == [[{"role": "user", "content": "12+34="}]]
    assert given["completions"] == [
        [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": "46"},
            {"role": "assistant", "content": "46"},
        ]
    ]
    assert given["completion_ids"] == [[3, 4, 5, 6, 7, 8, 9]], "from the first turn to the end"


def test_a_function_that_needs_trls_environments_is_refused() -> None:
    with pytest.raises(ValueError, match=r"asks for TRL's environments.*use the scorer 'environment'"):
        load_function("tests.support.trl_functions:of_environments")
    load_function("tests.support.trl_functions:of_optional_environments")


async def test_what_functions_log_is_in_details_and_metrics() -> None:
    async with scorer("logging", name="noted") as started:
        scores = await started.score(builders.group(0, ("a", "b")))
    assert [score.detail for score in scores] == ["place=0", "place=1"]
    assert REGISTRY.get_sample_value("penstock_reward_logged", {"scorer": "noted", "metric": "count"}) == 1.5


async def test_a_function_that_does_not_exist_stops_the_start() -> None:
    with pytest.raises(SettingsError, match="for scorer 'trl', found AttributeError"):
        async with scorer("nothing"):
            pass


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        (f"{FUNCTIONS}:scaled(2.0)", "expected arguments by name"),
        (f"{FUNCTIONS}:scaled(factor=open('x'))", "malformed node or string"),
        (f"{FUNCTIONS}:dict(a=1)", "has no attribute 'dict'"),
    ],
)
def test_a_factory_takes_literals_by_name(reference: str, sentence: str) -> None:
    with pytest.raises((ValueError, AttributeError), match=sentence):
        load_function(reference)


def test_a_weight_is_needed_for_each_function() -> None:
    with pytest.raises(ValueError, match="expected one weight for each of the 1 functions of scorer 'trl', found 2"):
        TrlScorer(kind="trl", functions=("m:f",), weights=(1.0, 2.0))


def test_parts_of_one_name_are_numbered() -> None:
    notes = Notes(1)
    for value in (1.0, 0.0):
        notes.log_part("right", [value])
    assert notes.parts == {"right": [1.0], "right_2": [0.0]}
    assert notes.metrics == {"right": 1.0, "right_2": 0.0}
    assert notes.extra == ["right=1.0, right_2=0.0"]
