"""Laws of distillation: the sampled gradient, its mixture with rewards, masked tokens, and groups without a teacher."""

import dataclasses
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from penstock.services.trainer.algorithm.kinds import kind_of
from penstock.services.trainer.algorithm.rules.distillation import skewed
from penstock.services.trainer.algorithm.token_advantages import assign
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.batch.token_data import LossInputs, add_teacher, of
from penstock.services.trainer.model.layers.logits import TokenLogprobs
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, Sample
from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings
from penstock.shared.settings.algorithm import AlgorithmSettings
from tests.support.tolerance import FORWARD, ULPS
from tests.trainer.algorithm.test_update import Rank, batch, settings, timeless

pytestmark = pytest.mark.usefixtures("one_rank")

POLICY_LOGITS, TEACHER_LOGITS = (0.3, -1.2, 2.0, 0.0, -0.4), (1.1, 0.2, -0.7, 0.5, -2.0)
RULES = (
    {"loss": "clip"},
    {"loss": "cispo"},
    {"loss": "policy_gradient", "correction": "token_tis"},
    {"loss": "clip", "proximal": "recomputed", "correction": "token_tis"},
)


def sampled_gradient(token: int, logits_V: torch.Tensor, algorithm: AlgorithmSettings) -> torch.Tensor:
    """Return the gradient of the step's loss if ``token`` was drawn."""
    logprobs_V = torch.log_softmax(logits_V, -1)
    teacher_V = torch.log_softmax(torch.tensor(TEACHER_LOGITS, dtype=torch.float64), -1)
    drawn = slice(token, token + 1)
    fake: Any = mock.Mock(lengths_S=np.array([1]), places_S=np.array([0]))
    inputs = LossInputs(
        fake,
        torch.tensor([1]),
        behavior_logprobs_N=logprobs_V[drawn].detach(),
        lags_N=torch.ones(1, dtype=torch.float64),
        proximal_logprobs_N=logprobs_V[drawn].detach() if algorithm.proximal == "recomputed" else None,
        teacher_logprobs_N=teacher_V[drawn],
    )
    assign([inputs], [np.ones(1, np.float32)], algorithm)
    kind = kind_of(Settings(algorithm=algorithm))
    out = kind.objective(inputs, TokenLogprobs(logprobs_V[drawn], torch.zeros(1, dtype=torch.float64)))
    (gradient_V,) = torch.autograd.grad(out.sums["rl"], logits_V)
    return gradient_V


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(rule.values()))
@pytest.mark.parametrize("coefficient", [1.0, 0.5])
@pytest.mark.parametrize("skew", [0.0, 0.1, 0.5])
def test_the_sampled_gradient_is_in_the_mean_that_of_the_reverse_kl_over_the_vocabulary(
    rule: dict[str, str], coefficient: float, skew: float
) -> None:
    values = {"advantage": "none", "distillation": coefficient, "distillation_skew": skew, **rule}
    algorithm = AlgorithmSettings.model_validate(values)
    logits_V = torch.tensor(POLICY_LOGITS, dtype=torch.float64, requires_grad=True)
    teacher_V = torch.log_softmax(torch.tensor(TEACHER_LOGITS, dtype=torch.float64), -1)
    policy_V = torch.log_softmax(logits_V, -1)
    compared_V = torch.log((1 - skew) * teacher_V.exp() + skew * policy_V.exp())
    kl = (policy_V.exp() * (policy_V - compared_V)).sum()
    (expected_V,) = torch.autograd.grad(coefficient * kl, logits_V)
    shares = torch.softmax(logits_V, -1).tolist()
    mean_V = sum(share * sampled_gradient(token, logits_V, algorithm) for token, share in enumerate(shares))
    assert torch.is_tensor(mean_V)
    assert torch.allclose(mean_V, expected_V, rtol=0, atol=1e-12)  # float64: a few roundings


def test_a_skew_bounds_what_a_token_costs() -> None:
    assert skewed(torch.tensor([0.0]), 0.1).tolist() == pytest.approx([0.0], abs=FORWARD)
    assert skewed(torch.tensor([1e4]), 0.1).tolist() == pytest.approx([math.log(10.0) - 0.9])
    assert torch.isfinite(skewed(torch.tensor([-1e4]), 0.1)).all()


def taught(difference: float) -> list[Experience]:
    """The batch, with teachers ``difference`` more sure of the first token of each sample, and less of the others."""

    def with_teacher(sample: Sample) -> Sample:
        change = np.full(len(sample.token_ids), -difference, np.float32)
        change[0] = difference
        return dataclasses.replace(sample, teacher_logprobs=np.minimum(sample.behavior_logprobs + change, 0.0))

    return [
        dataclasses.replace(
            e, group=dataclasses.replace(e.group, samples=tuple(with_teacher(sample) for sample in e.group.samples))
        )
        for e in batch()
    ]


def test_a_teacher_that_agrees_changes_nothing_and_reports_no_distance() -> None:
    alone, with_teacher = Rank(settings()).learn(batch()), Rank(settings(distillation=0.7)).learn(taught(0.0))
    assert with_teacher.pop("teacher_kl") == 0.0
    assert timeless(with_teacher) == timeless(alone)


def test_without_reward_advantages_the_policy_approaches_the_teacher_alone() -> None:
    chosen: dict[str, Any] = {"advantage": "none", "proximal": "recomputed", "correction": "token_tis"}
    student = Rank(settings(distillation=1.0, **chosen))
    groups = taught(0.2)
    gaps = [student.learn(groups, step)["teacher_kl"] for step in range(1, 9)]
    assert abs(gaps[-1]) < abs(gaps[0])
    equal = Rank(settings(distillation=1.0, **chosen))
    rewarded = [dataclasses.replace(e, rewards=1 - e.rewards) for e in groups]
    assert equal.learn(rewarded)["loss"] == Rank(settings(distillation=1.0, **chosen)).learn(groups)["loss"]


def test_of_a_sample_with_a_context_the_teachers_logprobs_are_those_of_the_trained_tokens() -> None:
    (group, *_) = taught(0.5)
    samples, contexts = group.group.samples, (1, 2, 0, 3)
    row = PackedRow(group.group.prompt_token_ids, samples, (0, 1, 2, 3), contexts=contexts)
    inputs = of(micro_batch([row]), [np.zeros(4, np.float32)] * 4, [False] * 4, torch.device("cpu"))
    add_teacher([inputs], [group])
    expected = [sample.teacher_logprobs[context:] for sample, context in zip(samples, contexts, strict=True)]  # type: ignore[index]
    assert inputs.teacher_logprobs_N is not None
    assert inputs.teacher_logprobs_N.tolist() == np.concatenate(expected).tolist()


def test_small_forward_passes_distil_as_one_does() -> None:
    whole = Rank(settings(distillation=1.0)).learn(taught(0.2))
    cut = Rank(settings(micro_batch_tokens=18, distillation=1.0)).learn(taught(0.2))
    assert whole["loss"] == pytest.approx(cut["loss"], abs=FORWARD)
    assert whole["teacher_kl"] == pytest.approx(cut["teacher_kl"], abs=ULPS)


def test_teacher_logprobs_travel_with_all_samples_or_with_none() -> None:
    (sent, *_) = taught(0.5)
    received = wire.decode(wire.encode(sent), Experience)
    for sample, original in zip(received.group.samples, sent.group.samples, strict=True):
        assert np.array_equal(sample.teacher_logprobs, original.teacher_logprobs)  # type: ignore[arg-type]
    (bare, *_) = batch()
    assert {sample.teacher_logprobs for sample in wire.decode(wire.encode(bare), Experience).group.samples} == {None}


def test_a_journalled_group_without_a_teacher_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="expected teacher logprobs with group 0 in the journal, found none"):
        Rank(settings(distillation=1.0)).learn(batch())


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"algorithm": {"advantage": "none"}}, "expected algorithm.distillation > 0 with algorithm.advantage = .none."),
        (
            {"algorithm": {"preset": "gspo", "distillation": 1.0}},
            'algorithm.distillation to be left out with algorithm.loss = "gspo"',
        ),
        (
            {"algorithm": {"preset": "dpo", "distillation": 1.0}},
            'algorithm.distillation to be left out with algorithm.loss = "dpo"',
        ),
        (
            {"algorithm": {"preset": "ppo", "distillation": 1.0}},
            'algorithm.distillation to be left out with algorithm.advantage = "gae"',
        ),
        (
            {"algorithm": {"preset": "dapo", "distillation": 1.0}},
            "algorithm.dynamic_sampling to be left out with algorithm.distillation = 1, which gives",
        ),
        (
            {"algorithm": {"loss": "cross_entropy", "distillation": 1.0}},
            'algorithm.distillation to be left out with algorithm.loss = "cross_entropy"',
        ),
        ({"algorithm": {"distillation": 1.0}, "sampling": {"top_p": 0.9}}, "expected no top_p, top_k, min_p"),
    ],
)
def test_what_was_not_compared_with_the_full_gradient_is_refused(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Settings.model_validate(tables)
