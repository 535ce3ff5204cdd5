"""Formulas of the update rule, with numbers worked by hand."""

import dataclasses
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.services.trainer.algorithm import advantages, diagnostics
from penstock.services.trainer.algorithm.advantages import group_advantages
from penstock.services.trainer.algorithm.kinds import Objective, kind_of
from penstock.services.trainer.algorithm.loss import aggregation, corrections, kl
from penstock.services.trainer.algorithm.rules import cispo, clip, dpo, gspo, policy_gradient
from penstock.services.trainer.batch import token_data
from penstock.services.trainer.model import critic
from penstock.services.trainer.model.layers.logits import TokenLogprobs
from penstock.shared.settings import Settings
from penstock.shared.settings.algorithm import AlgorithmSettings
from tests.support import builders
from tests.support.tolerance import ULPS

Array = np.ndarray[Any, np.dtype[np.float32]]


def rewards(*values: float) -> Array:
    return np.array(values, dtype=np.float32)


def logs(*ratios: float) -> torch.Tensor:
    return torch.log(torch.tensor(ratios))


def test_rloo_compares_a_sample_with_the_others_alone() -> None:
    assert group_advantages(rewards(1, 0, 0, 0), "rloo").tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_maxrl_divides_by_the_mean_so_that_rare_success_counts_more() -> None:
    assert group_advantages(rewards(1, 0, 0, 0), "maxrl").tolist() == pytest.approx(
        [0.75 / 0.2501, *[-0.25 / 0.2501] * 3]
    )
    assert group_advantages(rewards(0, 0), "maxrl").tolist() == [0.0, 0.0]


def test_maxrl_gives_no_advantage_where_the_mean_is_no_probability_of_success() -> None:
    for group in ((-1, 1, -1, -1), (1, -1, 0, 0), (0, 0, 0, -0.2)):
        assert group_advantages(rewards(*group), "maxrl").tolist() == [0.0] * 4


def test_a_text_has_no_advantage_over_itself() -> None:
    same = builders.experience(0, (1.0, 0.5, 0.25))
    assert advantages.shaped_rewards(same, AlgorithmSettings()).tolist() == pytest.approx([1.75 / 3] * 3)
    other = dataclasses.replace(same.group.samples[0], token_ids=np.array([0, 1, 3], dtype=np.int32))
    group = dataclasses.replace(same.group, samples=(*same.group.samples[:2], other))
    differs = dataclasses.replace(same, group=group)
    assert advantages.shaped_rewards(differs, AlgorithmSettings()).tolist() == [1.0, 0.5, 0.25]


def test_a_group_of_equal_rewards_has_no_signal() -> None:
    assert not advantages.has_signal(rewards(1, 1, 1))
    assert advantages.has_signal(rewards(1, 1, 0))


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 64), st.sampled_from(sorted(advantages.GROUP_ADVANTAGES)))
@example(0.1, 3, "dr_grpo")
@example(98765.4, 7, "grpo")
def test_equal_rewards_give_an_advantage_of_exactly_zero(reward: float, samples: int, kind: Any) -> None:
    equal = np.full(samples, reward, dtype=np.float32)
    assert group_advantages(equal, kind).tolist() == [0.0] * samples
    assert advantages.centred(equal).tolist() == [0.0] * samples


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 512))
@example(98765.4, 509)
def test_equal_rewards_of_a_whole_batch_are_normalised_to_exactly_zero(reward: float, tokens: int) -> None:
    equal = torch.full((tokens,), reward, dtype=torch.float32).double()
    with mock.patch.object(torch.distributed, "all_reduce"):
        mean, deviation = diagnostics.moments(equal)
    assert advantages.normalise(equal.numpy(), mean, deviation).tolist() == [0.0] * tokens


def test_overlong_samples_lose_linearly_up_to_one() -> None:
    lengths = np.array([3, 6, 8, 9, 10, 11])
    assert advantages.overlong_penalty(lengths, 10, 4).tolist() == [0.0, 0.0, -0.5, -0.75, -1.0, -1.0]
    assert advantages.overlong_penalty(lengths, 10, 0).tolist() == [0.0] * 6


def test_generalised_advantages_by_hand() -> None:
    # deltas 0.6-0.5, 0.8-0.6, 1-0.8; each plus half of the advantage after it
    actual = advantages.gae(np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.6, 0.8]), np.array([3]), 1.0, 0.5)
    assert actual.tolist() == pytest.approx([0.25, 0.3, 0.2])


def plain_gae(rewards: list[float], values: list[float], discount: float, decay: float) -> list[float]:
    advantages, following, value_after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + discount * value_after - value + discount * decay * following
        value_after = value
        advantages.append(following)
    return advantages[::-1]


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=6), st.floats(0.5, 1.0), st.floats(0.0, 1.0), st.integers(0, 99)
)
def test_generalised_advantages_of_many_samples_are_those_of_a_plain_loop(
    lengths: list[int], discount: float, decay: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    parts = [(generator.normal(size=n), generator.normal(size=n)) for n in lengths]
    expected = [a for r, v in parts for a in plain_gae(r.tolist(), v.tolist(), discount, decay)]
    actual = advantages.gae(
        np.concatenate([r for r, _ in parts]), np.concatenate([v for _, v in parts]), np.array(lengths), discount, decay
    )
    assert actual.tolist() == pytest.approx(expected, abs=1e-12)


def test_a_samples_reward_lies_at_its_last_token_and_penalties_at_theirs() -> None:
    actual = advantages.token_rewards(np.array([1.0, 2.0]), np.array([0.1, 0.2, 0.3]), np.array([2, 1]))
    assert actual.tolist() == pytest.approx([-0.1, 0.8, 1.7])


def test_normalised_values_have_mean_zero_and_deviation_one() -> None:
    values = np.array([1.0, 3.0, 8.0])
    actual = advantages.normalise(values, mean=float(values.mean()), deviation=float(values.std()))
    assert float(actual.mean()) == pytest.approx(0.0, abs=ULPS)
    assert float(actual.std()) == pytest.approx(1.0, rel=1e-4)  # ε beside a deviation of 2.9


@pytest.mark.parametrize(("kind", "expected"), [("token", 3.0), ("sequence", 2.75), ("constant", 0.75)])
def test_a_batchs_loss_weighs_tokens_or_samples(kind: aggregation.Aggregation, expected: float) -> None:
    loss, lengths = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), torch.tensor([2, 3])
    actual = aggregation.total(loss, lengths, kind) / aggregation.divisor(
        kind, aggregation.Count(tokens=5, samples=2), max_tokens=10
    )
    assert float(actual) == pytest.approx(expected)


def test_an_empty_micro_batch_adds_nothing_and_still_has_a_gradient() -> None:
    empty, none = torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    for kind in ("token", "sequence", "constant"):
        aggregation.total(empty * 1.0, none, kind).backward()
    assert empty.grad is not None


def test_dual_clip_bounds_what_a_bad_token_that_became_likelier_costs() -> None:
    loss = clip.clipped_ratio(
        logs(5.0, 2.0, 5.0), torch.zeros(3), torch.tensor([-1.0, -1.0, 1.0]), 0.2, 0.2, dual_clip=3.0
    )
    assert loss.loss_N.tolist() == pytest.approx([3.0, 2.0, -1.2])
    assert loss.clipped_high_N.tolist() == [True, False, True]


def test_gspo_clips_whole_samples_by_their_mean_ratio() -> None:
    # means of 0.2, -0.1 and of 0.02, 0: exp(0.05) = 1.05127 > 1.04, exp(0.01) = 1.01005 is not
    policy, lengths = torch.tensor([0.2, -0.1, 0.02, 0.0]), torch.tensor([2, 2])
    loss = gspo.sequence_clipped_ratio(policy, torch.zeros(4), torch.ones(4), lengths, 0.03, 0.04)
    assert loss.loss_N.tolist() == pytest.approx([-1.04, -1.04, -1.0100502, -1.0100502], abs=ULPS)
    assert loss.clipped_high_N.tolist() == [True, True, False, False]


@pytest.mark.parametrize(("mean", "has_gradient"), [(19.0, True), (21.0, False)])
def test_beyond_the_bound_a_sequences_ratio_has_no_gradient(mean: float, has_gradient: bool) -> None:
    policy, lengths = torch.tensor([mean, mean], requires_grad=True), torch.tensor([2])
    gspo.sequence_clipped_ratio(policy, torch.zeros(2), -torch.ones(2), lengths, 0.2, 0.2).loss_N.sum().backward()
    assert policy.grad is not None
    assert (policy.grad > 0).tolist() == [has_gradient] * 2


def test_gspos_token_form_has_the_gradient_of_its_sequence_form() -> None:
    lengths, anchor = torch.tensor([2, 3]), torch.tensor([-1.0, -0.7, -0.2, -2.0, -1.1])
    token = torch.tensor([-1.1, -0.6, -0.3, -1.8, -1.0], requires_grad=True)
    advantages_S = torch.tensor([1.0, -2.0])
    loss = gspo.sequence_clipped_ratio(token, anchor, advantages_S.repeat_interleave(lengths), lengths, 0.9, 9.0)
    aggregation.total(loss.loss_N, lengths, "sequence").backward()
    whole = token.detach().clone().requires_grad_()
    ratio_S = torch.stack([(whole - anchor)[:2].mean(), (whole - anchor)[2:].mean()]).exp()
    (-ratio_S * advantages_S).sum().backward()
    assert token.grad is not None
    assert whole.grad is not None
    assert torch.allclose(token.grad, whole.grad, atol=ULPS)


def test_cispo_keeps_every_tokens_gradient_with_a_bounded_weight() -> None:
    policy = logs(3.0, 0.5).requires_grad_()
    loss = cispo.clipped_weight(policy, torch.zeros(2), torch.tensor([1.0, 1.0]), clip_high=1.0)
    loss.loss_N.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-2.0, -0.5])  # the weights, not the derivatives of the ratios
    assert loss.clipped_high_N.tolist() == [True, False]


def test_the_policy_gradient_is_the_advantage() -> None:
    policy = logs(0.3, 0.5).requires_grad_()
    policy_gradient.policy_gradient(policy, torch.tensor([2.0, -1.0])).loss_N.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [-2.0, 1.0]


PRESETS: dict[str, dict[str, Any]] = {
    "clip": {"preset": "grpo"},
    "dual clip": {"preset": "grpo", "clip": (0.2, 0.2, 3.0)},
    "gspo": {"preset": "gspo"},
    "cispo": {"preset": "cispo"},
    "policy gradient": {"preset": "reinforce"},
    **{
        kind: {"preset": "reinforce", "correction": kind, "correction_band": (0.0 if "mask" in kind else 0.5, math.inf)}
        for kind in ("token_tis", "sequence_tis", "token_mask", "sequence_mask", "geometric_mask")
    },
}


def _objective(log_ratios: list[float], advantage: float, **algorithm: Any) -> tuple[Objective, torch.Tensor]:
    samples = np.array([len(log_ratios)])
    policy = torch.full((len(log_ratios),), -1.0, requires_grad=True)
    batch: Any = mock.Mock(lengths_S=samples, places_S=np.array([0]))
    known = token_data.LossInputs(
        batch,
        torch.from_numpy(samples),
        behavior_logprobs_N=-1.0 - torch.tensor(log_ratios),
        lags_N=torch.ones(len(log_ratios)),
        reference_logprobs_N=-1.0 + torch.tensor(log_ratios),
        advantages_N=torch.full((len(log_ratios),), advantage),
    )
    kind = kind_of(Settings.model_validate({"algorithm": {"max_lag": 0, **algorithm}}))
    out = kind.objective(known, TokenLogprobs(policy, torch.zeros(len(log_ratios))))
    (gradient,) = torch.autograd.grad(torch.stack(list(out.sums.values())).sum(), policy)
    return out, gradient


@pytest.mark.parametrize("loss", PRESETS)
@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=4))
@example([89.0])
@example([-1e30, 1e30])
def test_without_an_advantage_loss_and_gradient_are_exactly_zero_for_any_log_ratio(
    loss: str, log_ratios: list[float]
) -> None:
    out, gradient = _objective(log_ratios, 0.0, **PRESETS[loss])
    assert float(out.sums["rl"].detach()) == 0.0
    assert gradient.tolist() == [0.0] * len(log_ratios)


@pytest.mark.parametrize("loss", PRESETS)
@pytest.mark.parametrize("advantage", [-1.5, 1.5])
def test_no_log_ratio_makes_a_loss_a_gradient_or_a_figure_infinite(loss: str, advantage: float) -> None:
    # one token 89 nats from its anchor (float32's e^89 is infinite), k3 likewise
    kl = {"coefficient": 0.1, "estimator": "k3"}
    out, gradient = _objective([89.0, -89.0, 0.5], advantage, **PRESETS[loss], kl=kl)
    assert all(math.isfinite(float(whole.detach())) for whole in out.sums.values())
    assert torch.isfinite(gradient).all()
    with mock.patch.object(torch.distributed, "all_reduce"):
        sums = diagnostics.StepSums(torch.device("cpu"))
        sums.add(out.figures)
        figures = sums.over_ranks()
    assert all(map(math.isfinite, figures.values()))
    assert figures["ratio_max"] == pytest.approx(math.exp(20))


def test_beyond_twenty_nats_a_ratio_is_constant_and_below_them_it_is_itself() -> None:
    policy = torch.tensor([19.0, 21.0], requires_grad=True)
    ratios = torch.exp(kl.bounded(policy))
    assert ratios.tolist() == pytest.approx([math.exp(19), math.exp(20)])
    (gradient,) = torch.autograd.grad(ratios.sum(), policy)
    assert gradient.tolist() == pytest.approx([math.exp(19), 0.0])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # token ratios 4, 0.4 | 1, 1.5; of sequences 1.6 and 1.5; geometric means 1.265 and 1.225
        ("token_tis", [2.0, 0.4, 1.0, 1.5]),
        ("token_mask", [0.0, 0.0, 1.0, 1.5]),
        ("sequence_tis", [1.6, 1.6, 1.5, 1.5]),
        ("sequence_mask", [1.6, 1.6, 1.5, 1.5]),
        ("geometric_mask", [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_corrections_truncate_or_mask_what_lies_outside(kind: corrections.Correction, expected: list[float]) -> None:
    weights = corrections.weights(logs(4.0, 0.4, 1.0, 1.5), torch.zeros(4), torch.tensor([2, 2]), kind, 0.5, 2.0)
    assert weights.tolist() == pytest.approx(expected, rel=4 * ULPS)  # ratios by exp and log


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("sequence_tis", [1.2, 1.2, 0.25]), ("sequence_mask", [0.0, 0.0, 0.0]), ("geometric_mask", [0.0, 0.0, 0.0])],
)
def test_a_sample_is_rejected_as_a_whole(kind: corrections.Correction, expected: list[float]) -> None:
    weights = corrections.weights(logs(4.0, 0.5, 0.25), torch.zeros(3), torch.tensor([2, 1]), kind, 0.8, 1.2)
    assert weights.tolist() == pytest.approx(expected)


def test_no_gradient_flows_through_a_weight() -> None:
    anchor = logs(0.5).requires_grad_()
    assert not corrections.weights(anchor, torch.zeros(1), torch.tensor([1]), "token_tis", 0.5, 2.0).requires_grad


def test_log_linear_proximal_goes_from_behavior_to_the_policy_as_tokens_age() -> None:
    actual = corrections.log_linear(torch.full((4,), -2.0), torch.full((4,), -1.0), torch.tensor([0.0, 1.0, 2.0, 4.0]))
    assert actual.tolist() == pytest.approx([-1.0, -2.0, -1.5, -1.25])


def test_the_three_estimates_of_a_token() -> None:
    sampled, other = torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, 0.0])  # x = -1, 1
    assert kl.estimate(sampled, other, "k1").tolist() == [1.0, -1.0]
    assert kl.estimate(sampled, other, "k2").tolist() == [0.5, 0.5]
    assert kl.estimate(sampled, other, "k3").tolist() == pytest.approx([math.exp(-1), math.e - 2], abs=ULPS)


def test_k3_continues_as_its_tangent_from_ten_nats() -> None:
    at = kl.K3_TANGENT_AT
    sampled = torch.tensor([at - 1e-3, at, at + 1.0, 12.0, 40.0], dtype=torch.float64, requires_grad=True)
    values = kl.estimate(-sampled, torch.zeros(5, dtype=torch.float64), "k3")
    assert values.tolist()[1] == pytest.approx(10.0, abs=1e-3)
    assert (values[2:] - values[1]).tolist() == pytest.approx([(x - at) * (math.exp(at) - 1) for x in (at + 1, 12, 40)])
    (gradient,) = torch.autograd.grad(values.sum(), sampled)
    assert gradient.tolist() == pytest.approx([math.exp(at - 1e-3) - 1] + [math.exp(at) - 1] * 4)


def test_k1_and_k3_are_right_on_average() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    truth = float((p * (p / q).log()).sum())
    for estimator in ("k1", "k3"):
        assert float((p * kl.estimate(p.log(), q.log(), estimator)).sum()) == pytest.approx(truth, abs=ULPS)


def test_the_gradient_of_k2_in_a_loss_is_that_of_the_kl_and_that_of_k1_is_nothing() -> None:
    q = torch.tensor([0.2, 0.5, 0.3]).log()
    collected = {}
    for estimator in ("k1", "k2"):
        logits = torch.tensor([0.3, 0.1, -0.4], requires_grad=True)
        policy = torch.log_softmax(logits, -1)
        (policy.detach().exp() * kl.estimate(policy, q, estimator)).sum().backward()
        collected[estimator] = logits.grad
    logits = torch.tensor([0.3, 0.1, -0.4], requires_grad=True)
    policy = torch.log_softmax(logits, -1)
    (policy.exp() * (policy - q)).sum().backward()
    assert collected["k1"] is not None
    assert collected["k2"] is not None
    assert logits.grad is not None
    assert torch.allclose(collected["k1"], torch.zeros(3), atol=ULPS)
    assert torch.allclose(collected["k2"], logits.grad, atol=ULPS)


def test_a_groups_pair_is_its_best_and_its_worst() -> None:
    assert dpo.best_and_worst(rewards(0.5, 1, 0, 1, 0)) == (1, 2)
    assert dpo.best_and_worst(rewards(1, 1)) is None


def test_dpo_by_hand() -> None:
    actual = dpo.dpo(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.5]), beta=0.1)
    assert actual.margins_P.tolist() == pytest.approx([0.1])
    assert actual.loss_P.tolist() == pytest.approx([math.log1p(math.exp(-0.1))])


def test_the_critics_loss_does_not_reward_a_leap() -> None:
    values, earlier, returns = (
        torch.tensor([1.0, 0.0, 0.1]),
        torch.tensor([0.5, 1.0, 0.0]),
        torch.tensor([0.0, 0.0, 1.0]),
    )
    # max(1, 0.7²)/2, max(0, 0.8²)/2, max(0.9², 0.9²)/2
    assert critic.value_loss(values, earlier, returns, clip=0.2).tolist() == pytest.approx([0.5, 0.32, 0.405])
    assert critic.value_loss(values, earlier, returns, clip=0.0).tolist() == pytest.approx([0.5, 0.0, 0.405])


def test_the_effective_sample_size_is_all_of_the_tokens_where_ratios_are_equal() -> None:
    assert diagnostics.effective_share(ratios=4.0, squared_ratios=4.0, tokens=4) == 1.0
    assert diagnostics.effective_share(ratios=4.0, squared_ratios=6.0, tokens=4) == pytest.approx(2 / 3)
    assert diagnostics.effective_share(0.0, 0.0, 0) == 0.0
