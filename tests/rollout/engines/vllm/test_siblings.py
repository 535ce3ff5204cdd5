"""Guesses from a group's texts, by Triton's interpreter, and when they are made."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.services.rollout.engines.vllm.decoding.several_steps import open_siblings, single_steps
from penstock.services.rollout.engines.vllm.entry import vllm_arguments
from penstock.services.rollout.engines.vllm.scheduling.guessing import (
    GUESSED,
    GUESSING_UP_TO,
    PASS_TOKENS,
    Guessing,
)
from penstock.services.rollout.engines.vllm.scheduling.plain_decoding import TOKENS_EACH
from penstock.shared.errors import SettingsError
from tests.conftest import need_module

Settle = Callable[[list[list[int]], list[list[int]]], tuple[list[list[int]], list[int], list[int]]]
Guess = Callable[[list[list[int]], list[list[int]]], list[list[int]]]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Call a function in a process whose Triton interprets kernels."""
    need_module("triton", "vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            yield lambda function, *given: pool.submit(function, *given).result()


@pytest.fixture
def guess(interpreted: Callable[..., Any]) -> Guess:
    """Guess what follows texts, each request's first."""
    return lambda *given: interpreted(_guess, *given)


@pytest.fixture
def settle(interpreted: Callable[..., Any]) -> Settle:
    return lambda *given: interpreted(_settle, *given)


def _settle(drawn: list[list[int]], read: list[list[int]]) -> Any:
    from penstock.services.rollout.engines.vllm.decoding import siblings

    read_ids = torch.tensor(read).ravel().to(torch.int32)
    shift = 5  # of the batch in vLLM's buffer
    ids = torch.cat([torch.full((shift,), 99, dtype=torch.int32), read_ids])
    made = siblings.settle(torch.tensor(drawn).ravel(), ids, torch.arange(len(read_ids)) + shift)
    return [part.tolist() for part in made]


def _guess(texts: list[list[int]], searched: list[list[int]]) -> Any:
    from penstock.services.rollout.engines.vllm.decoding import siblings

    token_RT = torch.full((len(texts), 3000), 99, dtype=torch.int32)
    for row, text in enumerate(texts):
        token_RT[row, : len(text)] = torch.tensor(text)
    length_R = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    rows = torch.tensor([of_request[0] for of_request in searched], dtype=torch.int32)
    guess_Rd = torch.full((len(texts), 7), -5)
    siblings.guess(token_RT, length_R, rows, torch.tensor(searched, dtype=torch.int32), 2048, guess_Rd)
    return guess_Rd.tolist()


def test_guesses_follow_the_longest_occurrence_of_the_last_tokens(guess: Guess) -> None:
    texts = [[7, 1, 2, 3], [1, 2, 3, 40, 41, 42, 43, 44, 45, 46, 47], [2, 3, 50, 51], [5, 3, 60, 61]]
    made = guess(texts, [[0, 1, 2, 3]])
    assert made[0] == [40, 41, 42, 43, 44, 45, 46]
    assert made[1:] == [[-5] * 7] * 3, "requests that have no guesses"


def test_of_equal_occurrences_the_latest_is_followed_in_any_block(guess: Guess) -> None:
    text = [3, 10, *range(100, 1600), 3, 20, *range(100, 500), 3]
    assert guess([text], [[0]])[0] == [20, 100, 101, 102, 103, 104, 105]


def test_a_text_that_repeats_itself_is_guessed_to_go_on(guess: Guess) -> None:
    assert guess([[8, 9, 8, 9, 8]], [[0]])[0] == [9, 8, 9, 8, 9, 8, 9]


def test_without_an_occurrence_guesses_are_some_token(guess: Guess) -> None:
    assert guess([[1, 2], [3, 4]], [[0, 1], [1, -1]]) == [[0] * 7, [0] * 7]


def test_tokens_count_up_to_the_first_that_differs_from_its_guess(settle: Settle) -> None:
    read = [5, 11, 12, 13, 14, 15, 16, 17]
    right = [11, 12, 13, 14, 15, 16, 17, 18]
    drawn = [right, [0, *right[1:]], [11, 0, *right[2:]], [*right[:6], 0, 18]]
    tokens, sampled, rejected = settle(drawn, [read] * 4)
    assert tokens == [right, [0, *[-1] * 7], [11, 0, *[-1] * 6], [*right[:6], 0, -1]]
    assert (sampled, rejected) == ([8, 1, 2, 7], [0, 7, 6, 1])


def test_tokens_are_guessed_for_few_requests_with_room() -> None:
    guessing = Guessing(4)
    assert [guessing.passes(requests, 8, 999, 100) for requests in (1, 4, 5)] == [8, 8, 0]
    assert [guessing.passes(1, 1, 999, room) for room in (7, 8, 100)] == [0, 1, 1]
    assert guessing.passes(1, 8, 999, 17) == 2
    assert [guessing.passes(1, 8, left, 100) for left in (-5, 15, 32, 64, 127, 128)] == [1, 1, 2, 4, 7, 8]
    assert Guessing(0).passes(1, 8, 999, 100) == 0


def test_the_setting_joins_the_users_additional_config() -> None:
    vllm = SimpleNamespace(arguments={"additional_config": {"own": 1}}, quantization="none", speculation=8)
    settings: Any = SimpleNamespace(rollout=SimpleNamespace(vllm=vllm), publishes_adapters=False)
    assert vllm_arguments(settings) == {"additional_config": {"own": 1, GUESSING_UP_TO: 8}}
    vllm.speculation = 0
    assert vllm_arguments(settings) == {"additional_config": {"own": 1}}


def test_a_runner_that_cannot_guess_is_refused_with_the_setting() -> None:
    need_module("vllm", "vllm")
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(
            additional_config={GUESSING_UP_TO: 8}, scheduler_config=SimpleNamespace(scheduler_cls="their.Own")
        ),
        parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1),
        device=torch.device("cpu"),
        model_runner=SimpleNamespace(),
    )
    with pytest.raises(
        SettingsError, match=r"found cpu, .* and the scheduler vLLM's: set rollout\.vllm\.speculation = 0"
    ):
        open_siblings(worker, "")
    worker.vllm_config.additional_config = {}
    assert open_siblings(worker, "") is None


def test_guesses_that_are_wrong_are_tried_again_after_longer_and_longer_rests() -> None:
    guessing, rests = Guessing(4), list[int]()
    for _ in range(7):
        while passes := guessing.passes(1, 1, 999, 100):
            guessing.learn(tokens=passes, passes=passes)
        rests.append(1)
        while not guessing.passes(1, 1, 999, 100):
            rests[-1] += 1
        guessing.learn(tokens=1, passes=1)
    assert rests == [63, 127, 255, 511, 1023, 1023, 1023]
    for _ in range(40):
        guessing.learn(tokens=20, passes=4)
    assert guessing.mean == pytest.approx(5.0, abs=0.1)
    assert guessing.passes(1, 1, 999, 100) == 1


def test_a_step_with_guesses_consists_of_passes() -> None:
    need_module("vllm", "vllm")
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs = cached = CachedRequestData.make_empty()
    cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens = ["a", "b"], [10, 20], [3, 4]
    step.num_scheduled_tokens, step.finished_req_ids = {"a": 16, "b": 16}, {"c"}
    setattr(step, TOKENS_EACH, 2 * PASS_TOKENS)
    setattr(step, GUESSED, True)
    first, second = single_steps(step)
    for single in (first, second):
        assert single.num_scheduled_tokens == {"a": 8, "b": 8}
        assert single.total_num_scheduled_tokens == 16
        assert single.scheduled_spec_decode_tokens == {"a": [-1] * 7, "b": [-1] * 7}
    assert second.scheduled_cached_reqs.num_computed_tokens == [18, 28]
    assert (first.finished_req_ids, second.finished_req_ids) == ({"c"}, set())
