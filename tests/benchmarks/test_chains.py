"""Laws of policies that call a tool, or end after about a given number of tokens: what Penstock and TRL make of them."""

import asyncio
import doctest
import queue
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers import chains
from benchmarks.peers.chains import TURN_TOKENS, TURNS, Places, words_of
from benchmarks.peers.pipeline import run_trl
from benchmarks.peers.trl_async import tokenizer_of
from benchmarks.peers.trl_grpo import lot
from benchmarks.peers.work import Work, spread, tool
from penstock.services.episodes.answers import AnswerParser
from penstock.services.episodes.episode import Episode, Limits
from penstock.services.episodes.messages import Message
from penstock.services.episodes.renderer import Renderer
from penstock.shared.bus.messages import FinishReason, Int32Array, Sampling
from penstock.shared.peers.turns import DrawnTurn
from penstock.shared.reasoning import KNOWN
from penstock.shared.settings.root import Settings
from tests.support import builders

TOKENS = TURN_TOKENS["cpu"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return tool(tmp_path_factory.mktemp("work"), "tiny", "cpu", "auto")


class Policy:
    """Draws answers with the model of a work."""

    def __init__(self, work: Work) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(work.model)

    @torch.no_grad()
    def draw(self, prompt_ids: list[int], samples: int = 1, tokens: int = TOKENS) -> list[list[int]]:
        """Return answers, each up to its end."""
        ids = torch.tensor([prompt_ids])
        drawn = self._model.generate(
            ids, do_sample=True, top_k=0, max_new_tokens=tokens, num_return_sequences=samples
        )  # fmt: skip
        end = self._model.config.eos_token_id
        rows = drawn[:, ids.shape[1] :].tolist()
        return [row[: row.index(end) + 1] if end in row else row for row in rows]


def test_the_examples_in_its_docstrings_hold() -> None:
    results = doctest.testmod(chains)
    assert results.attempted == 1
    assert results.failed == 0


@pytest.mark.parametrize("turn_tokens", TURN_TOKENS.values())
def test_no_word_follows_two_places(turn_tokens: int) -> None:
    words = [word for words in words_of(turn_tokens) for word in words]
    assert len({*words}) == len(words) == 16 * (turn_tokens - 4)


def test_each_answer_is_a_call_in_penstock_and_is_never_rendered_again(work: Work) -> None:
    tokenizer, policy = tokenizer_of(work.model), Policy(work)
    torch.manual_seed(0)

    async def draw(token_ids: Int32Array, sampling: Sampling, number: int) -> DrawnTurn:
        (ids,) = policy.draw(token_ids.tolist())
        spans = np.array([[0, 0]], dtype=np.int32)
        return DrawnTurn(np.array(ids, np.int32), np.zeros(len(ids), np.float32), spans, FinishReason.STOP)

    async def play() -> tuple[list[Message], int]:
        renderer, parser = Renderer(tokenizer), AnswerParser(tokenizer, KNOWN)
        episode = Episode(builders.prompt(), renderer, parser, draw, Limits(TURNS, 1 << 20, 1e4))
        messages, answers = [Message("user", "abc")], list[Message]()
        for _ in range(TURNS):
            answer = await episode.answer(messages, [_schema()])
            answers.append(answer.message)
            messages += [answer.message, Message("tool", Places().look(0), name="look")]
        return answers, len(episode.sample(1.0).segments)

    answers, segments = asyncio.run(play())
    assert [call.name for answer in answers for call in answer.calls] == ["look"] * TURNS
    assert all(0 <= call.values["place"] <= 9 for answer in answers for call in answer.calls)
    assert segments == 2 * TURNS  # one row: a prompt or a tool's answer, and an answer, in turn


def _schema() -> dict[str, Any]:
    from transformers.utils import get_json_schema

    schema: dict[str, Any] = get_json_schema(Places().look)
    return schema


def test_each_answer_is_a_call_in_trl_which_finds_its_tokens_again(work: Work) -> None:
    worker = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker")
    policy = Policy(work)
    torch.manual_seed(0)

    class Loop(worker._AsyncRolloutLoop):  # type: ignore[misc, name-defined]
        async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
            (ids,) = policy.draw(prompt_ids, tokens=self.max_tokens)
            return ids, [0.0] * len(ids)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop = Loop(
            model_name=work.model, dataset=[], reward_funcs=[lot], processing_class=tokenizer_of(work.model),
            eos_token_ids=[0], rollout_buffer=None, model_version_value=None, heartbeat_value=None, failed_event=None,
            exception_info_queue=None, metrics_queue=queue.Queue(), environment_factory=Places, max_tokens=TOKENS,
            max_tool_calling_iterations=TURNS - 1,
        )  # fmt: skip
    look = Places().look
    try:
        messages, ids, rows, calls, failures, _ = loop._loop.run_until_complete(
            loop._generate_one([{"role": "user", "content": "abc"}], {"look": look}, [look])
        )
    finally:
        loop._tool_pool.shutdown()
        loop._loop.close()
    assert [message["role"] for message in messages] == ["assistant", "tool"] * (TURNS - 1) + ["assistant"]
    assert [len(message["tool_calls"]) for message in messages[::2]] == [1] * TURNS
    assert (calls, failures, len(ids)) == (TURNS - 1, 0, TURNS * TOKENS)
    (row,) = rows
    assert sum(row.completion_mask) == TURNS * TOKENS


def test_trls_trainer_of_single_answers_is_refused(work: Work, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="trl trains single answers: use --modes trl_async"):
        run_trl(tmp_path, work, 3, 600.0, "trl")


def test_siblings_differ_from_their_first_word_on(work: Work) -> None:
    torch.manual_seed(0)
    tokenizer = tokenizer_of(work.model)
    answers = Policy(work).draw(tokenizer("\n")["input_ids"], samples=16)
    assert {len(answer) for answer in answers} == {TOKENS}
    assert len({answer[0] for answer in answers}) > 6  # of 16 words, 10.3 on average


def test_completions_of_spread_have_about_their_length(tmp_path: Path) -> None:
    made = spread(tmp_path, "tiny", "cpu", "auto")
    torch.manual_seed(0)
    lengths = [len(answer) for answer in Policy(made).draw([2, 3, 4], samples=256, tokens=60)]
    assert np.mean(lengths) == pytest.approx(20 + 1, abs=5 * 5 / 16)  # 16 stages of 1.25 tokens, the end after them


@pytest.mark.parametrize(
    ("make", "context", "flags", "rows"),
    [(tool, 2304, ["--turns", "4"], "6"), (spread, 4352, ["--gradient-checkpointing"], "10")],
)
def test_works_are_settings_of_penstock_and_arguments_of_trl(
    make: Any, context: int, flags: list[str], rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 samples of 4 x 128 + 3 x 100 + 8 tokens in rows of 32,768; 64 of 2,560 + 8 in rows of 16,384."""
    monkeypatch.setattr("benchmarks.peers.work._write_once", lambda *_: None)
    made = make(tmp_path, "0.5b", "cuda", "auto")
    settings = Settings.model_validate(made.settings)
    assert (settings.rollout.vllm.max_model_len, made.context_tokens) == (context, context)
    told = made.asynchronous_arguments(8)
    assert told[-len(flags) :] == flags
    assert told[told.index("--micro-batches") + 1] == rows
