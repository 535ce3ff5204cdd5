"""Laws of the update rule."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.trainer.algorithm import kinds
from penstock.services.trainer.algorithm.advantages import group_advantages
from penstock.services.trainer.algorithm.loss.kl import estimate
from penstock.services.trainer.algorithm.rules.clip import clipped_ratio
from penstock.services.trainer.algorithm.schedule import scheduled
from penstock.services.trainer.batch.assignment import plan
from penstock.services.trainer.batch.packing import MicroBatch, PackedRow, micro_batch, split_row
from penstock.services.trainer.batch.staleness import (
    are_long,
    find_contexts,
    is_fenced,
    lag_steps,
    token_lags,
    without_long,
)
from penstock.services.trainer.metrics import batch_figures
from penstock.services.trainer.model.policy import Policy
from penstock.shared.bus.messages import Ended, FinishReason, PolicyVersion, Sample
from penstock.shared.settings import TrainerSettings
from penstock.shared.settings.rules import LOSSES, OWN
from tests.support import builders
from tests.support.tolerance import FORWARD, GRADIENT, ULPS, gap

V = PolicyVersion


def rewards(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


def test_grpo_advantages_are_centred_and_divided_by_the_groups_deviation() -> None:
    # mean 0.25, deviation sqrt(3)/4 = 0.4330127
    advantages = group_advantages(rewards(1, 0, 0, 0), "grpo")
    assert advantages.tolist() == pytest.approx([0.75 / 0.4331127, *[-0.25 / 0.4331127] * 3], abs=ULPS)


def test_dr_grpo_advantages_are_only_centred() -> None:
    assert group_advantages(rewards(1, 0, 0, 0), "dr_grpo").tolist() == [0.75, -0.25, -0.25, -0.25]


def test_a_group_without_spread_has_no_advantage() -> None:
    assert group_advantages(rewards(1, 1, 1), "grpo").tolist() == [0.0, 0.0, 0.0]


def test_the_clipped_ratio_takes_the_smaller_of_free_and_bounded() -> None:
    behavior = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5]))
    policy = torch.log(torch.tensor([0.9, 0.9, 0.2, 0.2]))  # ratios 1.8 1.8 0.4 0.4
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss = clipped_ratio(policy, behavior, advantages, clip_low=0.2, clip_high=0.3)
    # min(1.8, 1.3) + min(-1.8, -1.3) + min(0.4, 0.8) + min(-0.4, -0.8)
    assert float(loss.loss_N.sum()) == pytest.approx(-(1.3 - 1.8 + 0.4 - 0.8), abs=ULPS)
    assert loss.clipped_high_N.tolist() == [True, False, False, False]
    assert loss.clipped_low_N.tolist() == [False, False, False, True]


def test_a_clipped_token_has_no_gradient_and_a_free_one_has_the_policy_gradient() -> None:
    behavior = torch.zeros(2)
    policy = torch.tensor([1.0, 0.0], requires_grad=True)  # ratios e, 1
    clipped_ratio(policy, behavior, torch.tensor([1.0, 2.0]), 0.2, 0.2).loss_N.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.0, -2.0]


def test_kl_is_zero_where_policies_agree_and_never_negative() -> None:
    behavior, policy = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, 0.0])
    # exp(x) - 1 - x for x = 0, -1, 1
    assert estimate(behavior, policy, "k3").tolist() == pytest.approx([0.0, 0.3678794, 0.7182818], abs=ULPS)


STEPS = {V(3): 2, V(4): 3, V(9): 8}


def spanned(*spans: tuple[int, int]) -> Sample:
    return dataclasses.replace(builders.sample(tokens=6), version_spans=np.array(spans, dtype=np.int32))


def test_lag_counts_steps_since_the_oldest_trained_token() -> None:
    sample = spanned((0, 3), (2, 4), (5, 9))
    assert [lag_steps(sample, 8, STEPS, context) for context in (0, 1, 2, 4, 5)] == [6, 6, 5, 5, 0]
    assert lag_steps(spanned((0, 7)), 8, STEPS) == 8, "unknown versions are the initial policy"


def test_each_trained_token_has_the_lag_of_its_own_version() -> None:
    sample = spanned((0, 3), (2, 4), (5, 9))
    assert [token_lags(sample, {V(3): 6, V(4): 5, V(9): 0}, context).tolist() for context in (0, 3, 6)] == [
        [6, 6, 5, 5, 5, 0],
        [5, 5, 0],
        [],
    ]


@pytest.mark.parametrize(
    ("max_lag", "mask", "sample", "group"),
    [
        (6, (0, 0, 0), (0, 0, 0), (0, 0, 0)),
        (5, (2, 0, 6), (6, 0, 6), (6, 6, 6)),
        (4, (5, 0, 6), (6, 0, 6), (6, 6, 6)),
    ],
)
def test_staleness_is_judged_by_sample(max_lag: int, mask: object, sample: object, group: object) -> None:
    samples = (spanned((0, 3), (2, 4), (5, 9)), spanned((0, 9)), spanned((0, 3)))
    of = dataclasses.replace(builders.group(texts=("1", "2", "3")), samples=samples)
    assert find_contexts(of, 8, STEPS, max_lag, "mask") == mask
    assert find_contexts(of, 8, STEPS, max_lag, "sample") == sample
    assert find_contexts(of, 8, STEPS, max_lag, "group") == group


def test_a_token_before_one_that_is_over_the_bound_is_context_too() -> None:
    of = dataclasses.replace(builders.group(texts=("1",)), samples=(spanned((0, 9), (1, 3), (2, 4)),))
    assert find_contexts(of, 8, STEPS, 5, "mask") == (2,)


def test_a_group_with_a_token_of_a_revoked_version_is_fenced() -> None:
    group = builders.group(version=3)
    assert not is_fenced(group, {V(4)})
    assert is_fenced(group, {V(4), V(3)})


def test_lags_are_counted_of_trained_samples_and_every_sample_is_accounted_for() -> None:
    samples = (spanned((0, 3), (2, 4)), spanned((0, 3)))
    made = builders.experience(0, (1.0, 0.0))
    prompt = dataclasses.replace(made.group.prompt, sampling=builders.prompt(samples=3).sampling)
    group = dataclasses.replace(made.group, prompt=prompt, samples=samples)
    figures = batch_figures([dataclasses.replace(made, group=group)], 8, STEPS, (2, 6), most_tokens=9)
    assert (figures.samples, figures.tokens, dict(figures.lag_counts)) == (1, 4, {5: 1})
    names = ("stale_samples", "masked_tokens", "unscored_samples", "lag_mean", "response_tokens_mean")
    assert [figures.metrics[name] for name in names] == [1.0, 2.0, 1.0, 5.0, 6.0]


def test_a_sample_that_fits_no_forward_pass_loses_itself_and_is_counted_apart_from_stale_ones() -> None:
    samples = (
        spanned((0, 9)),
        dataclasses.replace(builders.sample(tokens=3), version_spans=np.array([[0, 9]])),
        spanned((0, 3)),
    )
    of = dataclasses.replace(builders.group(texts=("1", "2", "3")), samples=samples)  # a prompt of 3 tokens
    assert are_long(of, 8) == [True, False, True]
    contexts = without_long(of, (0, 1, 0), 8)
    assert contexts == (6, 1, 6)
    made = dataclasses.replace(builders.experience(0, (1.0, 0.0, 1.0)), group=of)
    figures = batch_figures([made], 8, STEPS, contexts, most_tokens=8)
    assert (figures.samples, figures.tokens) == (1, 2)
    assert [figures.metrics[name] for name in ("too_long_samples", "stale_samples", "masked_tokens")] == [2.0, 0.0, 1.0]


@pytest.mark.parametrize(("last", "equal"), [(0.9, 1.0), (0.8, 0.0)])
def test_groups_of_equal_rewards_are_counted_whatever_their_mean_rounds_to(last: float, equal: float) -> None:
    made = builders.experience(0, (*[0.9] * 11, last))
    assert float(np.full(12, 0.9, np.float32).std()) > 0.0
    assert batch_figures([made], 0, {}, most_tokens=9).metrics["zero_std_groups"] == equal


def test_a_steps_report_says_how_its_episodes_were_played() -> None:
    played = builders.episode()  # a call of two tokens, an observation of two and an answer of three, after three
    told = json.loads(played.transcript)
    told["turns"][1]["waited_s"], told["metrics"] = 2.5, {"tries": 3.0, "a b\ud800": 1.0}
    other = dataclasses.replace(played, ended=Ended.STOP, transcript=json.dumps(told).encode())
    group = dataclasses.replace(builders.group(0, ("46", "47")), samples=(played, other))
    scored = dataclasses.replace(builders.experience(), group=group)
    metrics = batch_figures([scored], 1, {PolicyVersion(0): 0}, most_tokens=99).metrics
    assert {name: metrics[name] for name in metrics if name.startswith("episode_")} == {
        "episode_turns_mean": 2.0,
        "episode_calls_mean": 1.0,
        "episode_given_tokens_mean": 5.0,
        "episode_wait_s_mean": 1.25,
    }
    ended = {name: share for name, share in metrics.items() if name.startswith("ended_")}
    assert ended == {"ended_stop": 0.5, "ended_turns": 0.5} | dict.fromkeys(
        ("ended_length", "ended_context", "ended_deadline", "ended_agent"), 0.0
    )
    assert {name: metrics[name] for name in metrics if name.startswith("environment_")} == {
        "environment_mean_tries": 3.0,
        "environment_mean_a_b_": 1.0,
    }
    plain = batch_figures([builders.experience()], 1, {PolicyVersion(0): 0}, most_tokens=99).metrics
    assert not [name for name in plain if name.startswith(("episode_", "ended_", "environment_"))]


def test_context_is_computed_and_not_trained() -> None:
    laid = micro_batch([dataclasses.replace(row(3, 3, 2), contexts=(2, 0))])
    assert laid.input_ids_BT.tolist() == [[0, 1, 2, 0, 1, 100]]
    assert laid.columns_N.tolist() == [4, 2, 5]
    assert laid.targets_N.tolist() == [2, 100, 101]
    assert laid.lengths_S.tolist() == [1, 2]


def test_the_learning_rate_depends_on_the_step_alone() -> None:
    settings = TrainerSettings(learning_rate=1.0, warmup_steps=4, schedule="linear", final_learning_rate=0.2)
    assert [scheduled(settings, 1.0, step, 14) for step in (1, 4, 9, 14)] == pytest.approx([0.25, 1.0, 0.6, 0.2])
    cosine = TrainerSettings(learning_rate=1.0, schedule="cosine")
    assert scheduled(cosine, 1.0, 5, 10) == pytest.approx(0.5)
    assert scheduled(TrainerSettings(), 0.3, 10**6, 10) == 0.3


def row(prompt: int, *lengths: int) -> PackedRow:
    samples = tuple(builders.unlike(place, length) for place, length in enumerate(lengths))
    return PackedRow(np.arange(prompt, dtype=np.int32), samples, tuple(range(len(lengths))))


def test_a_group_lies_in_one_row_with_its_prompt_once() -> None:
    laid = micro_batch([row(3, 3, 2)])
    assert laid.input_ids_BT.tolist() == [[0, 1, 2, 0, 1, 100]]
    assert laid.position_ids_BT.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert laid.segments.starts_K.tolist() == [0, 3, 5]
    assert laid.columns_N.tolist() == [2, 3, 4, 2, 5]
    assert laid.targets_N.tolist() == [0, 1, 2, 100, 101]
    assert (laid.lengths_S.tolist(), laid.places_S.tolist()) == ([3, 2], [0, 1])


def test_a_merged_row_counts_as_its_trained_tokens_where_these_are_more() -> None:
    same = PackedRow(np.arange(4, dtype=np.int32), tuple(builders.sample(tokens=50) for _ in range(8)), tuple(range(8)))
    assert same.is_merged
    assert (same.tokens, same.size) == (4 + 49, 8 * 50)
    batches = [batch for share in plan([same, same], 120, 1) for batch in share]
    assert sum(len(batch.targets_N) for batch in batches) == 2 * 8 * 50
    assert all(len(batch.targets_N) <= 120 for batch in batches), "hidden states and logits are of trained tokens"


def test_pieces_fit_where_a_row_of_one_more_sample_is_merged_and_shorter() -> None:
    lengths, equal_at_first = (20, 20, 30, 30, 30), (0, 0, 24, 24, 24)
    ids = [
        np.concatenate([np.arange(7000, 7000 + equal), np.arange(length - equal) + 100 * place]).astype(np.int32)
        for place, (length, equal) in enumerate(zip(lengths, equal_at_first, strict=True))
    ]
    samples = tuple(dataclasses.replace(builders.sample(tokens=len(each)), token_ids=each) for each in ids)
    group = PackedRow(np.arange(9, dtype=np.int32), samples, tuple(range(len(ids))))
    for cap in range(40, 180):
        batches = [batch for share in plan([group, row(30, 5)], cap, 1) for batch in share]
        assert all(batch.tokens <= cap and len(batch.targets_N) <= cap for batch in batches)
        assert sum(len(batch.targets_N) for batch in batches) == sum(lengths) + 5


def test_a_row_over_the_cap_is_split_between_completions_and_loses_none() -> None:
    pieces = split_row(row(4, 5, 5, 5), max_tokens=12)
    assert [len(piece.samples) for piece in pieces] == [2, 1]
    assert [piece.places for piece in pieces] == [(0, 1), (2,)]
    assert all(piece.tokens <= 12 for piece in pieces)


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5)), min_size=1, max_size=12
    ),
    st.integers(18, 80),
    st.integers(1, 4),
)
def test_every_token_is_trained_once_within_the_cap_on_equally_many_micro_batches(
    shapes: list[tuple[int, list[int]]], max_tokens: int, ranks: int
) -> None:
    rows = [row(prompt, *lengths) for prompt, lengths in shapes]
    shares = plan(rows, max_tokens, ranks)
    assert len({len(share) for share in shares}) == 1
    batches = [batch for share in shares for batch in share]
    assert sum(len(batch.targets_N) for batch in batches) == sum(sum(lengths) for _, lengths in shapes)
    assert all(batch.tokens <= max_tokens for batch in batches)


def tiny_model(seed: int = 0) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=23, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def real_row(generator: np.random.Generator, prompt: int, lengths: Sequence[int]) -> PackedRow:
    samples = tuple(
        Sample(
            token_ids=generator.integers(0, 23, length).astype(np.int32),
            behavior_logprobs=np.zeros(length, dtype=np.float32),
            version_spans=np.array([[0, 0]], dtype=np.int32),
            finish_reason=FinishReason.STOP,
            text="",
        )
        for length in lengths
    )
    return PackedRow(generator.integers(0, 23, prompt).astype(np.int32), samples, tuple(range(len(lengths))))


def separate_logprobs(model: Any, rows: Sequence[PackedRow]) -> torch.Tensor:
    completions = []
    for packed in rows:
        for sample in packed.samples:
            ids = torch.from_numpy(np.concatenate([packed.prompt_token_ids, sample.token_ids]).astype(np.int64))
            logits = model(input_ids=ids[None]).logits[0, :-1] / packed.temperature
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
            completions.append(logprobs[len(packed.prompt_token_ids) - 1 :])
    return torch.cat(completions)


def test_packed_logprobs_and_gradients_equal_those_of_separate_sequences() -> None:
    model, generator = tiny_model(), np.random.default_rng(0)
    lengths = ((5, (4, 1, 6), 0.7), (9, (2, 2), 1.3), (1, (3,), 1.0))
    rows = [dataclasses.replace(real_row(generator, p, s), temperature=t) for p, s, t in lengths]
    packed = Policy(model)(micro_batch(rows)).policy_logprobs_N
    plain = separate_logprobs(model, rows)
    assert torch.allclose(packed, plain, atol=FORWARD)
    weights = list(model.parameters())
    of_packed = torch.autograd.grad(packed.sum(), weights, retain_graph=True)
    other = torch.autograd.grad(plain.sum(), weights)
    assert gap(of_packed, other) < GRADIENT


def test_entropy_is_that_of_the_tempered_distribution() -> None:
    model, generator = tiny_model(), np.random.default_rng(1)
    packed = dataclasses.replace(real_row(generator, 4, (2,)), temperature=2.0)
    out = Policy(model)(micro_batch([packed]))
    ids = torch.from_numpy(np.concatenate([packed.prompt_token_ids, packed.samples[0].token_ids]).astype(np.int64))
    distribution = torch.distributions.Categorical(logits=model(input_ids=ids[None]).logits[0, 3:5] / 2.0)
    assert torch.allclose(out.entropy_N, distribution.entropy(), atol=FORWARD)
    assert not out.entropy_N.requires_grad


def test_where_behavior_and_policy_are_equal_the_ratio_is_one_and_the_kl_zero() -> None:
    model, generator = tiny_model(), np.random.default_rng(2)
    batch = micro_batch([real_row(generator, 5, (4, 3))])
    logprobs = Policy(model)(batch).policy_logprobs_N
    behavior = logprobs.detach()
    assert float(estimate(behavior, logprobs, "k3").detach().max()) == 0.0
    loss = clipped_ratio(logprobs, behavior, torch.ones(7), 0.2, 0.2)
    assert float(loss.loss_N.sum().detach()) == pytest.approx(-7.0)
    assert not (loss.clipped_low_N | loss.clipped_high_N).any()


def test_an_empty_micro_batch_trains_nothing() -> None:
    model = tiny_model()
    empty: MicroBatch = micro_batch([])
    out = Policy(model)(empty)
    loss = clipped_ratio(out.policy_logprobs_N, torch.zeros(0), torch.zeros(0), 0.2, 0.2).loss_N.sum()
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(p.grad is None or not math.isnan(float(p.grad.sum())) for p in model.parameters())
    assert all(p.grad is None or float(p.grad.abs().sum()) == 0.0 for p in model.parameters())


def test_every_loss_that_settings_know_has_its_file() -> None:
    folder = Path(kinds.__file__).parent / "rules"
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "distillation"}
    assert files == {"own" if name == OWN else name for name in LOSSES}
