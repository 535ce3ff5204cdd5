"""Laws of steps with demonstrations beside samples: each part's gradient is what it is alone, and so are its figures."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from services.trainer.algorithm.minibatches import lay_out
from services.trainer.algorithm.update import Learner
from services.trainer.batch import oom_split
from services.trainer.batch.packing import TOKENS_ALONE, MicroBatch
from services.trainer.metrics import batch_figures
from services.trainer.model.engine import TrainingEngine
from services.trainer.model.layers.logits import TokenLogprobs
from services.trainer.phases import Phases
from shared.bus.messages import Experience
from tests.support import tiny
from tests.support.tolerance import FORWARD
from tests.trainer.algorithm.test_update import Rank, batch, demonstrated, settings

pytestmark = pytest.mark.usefixtures("one_rank")

WEIGHT = 0.3
ROUNDING = 1e-12
"""Of a few hundred float64 terms, added in another order."""
OF_SAMPLES = (
    "rl_loss", "reference_kl_loss", "kl_mean", "kl_max", "entropy", "clip_fraction", "masked_fraction", "ess", "ratio_max",
    "logprob_gap", "reference_kl", "value_loss", "explained_variance", "teacher_kl", "kl_coefficient",
)  # fmt: skip


class Bigrams:
    """A policy of one float64 matrix, in place of a training engine."""

    ranks, device, shares_prompts, sizes, recovers = 1, torch.device("cpu"), True, TOKENS_ALONE, False

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.logits_VV = torch.randn(tiny.VOCABULARY, tiny.VOCABULARY, generator=generator, dtype=torch.float64)
        self.logits_VV.requires_grad_(True)

    def logprobs(self, before: Any, tokens: Any) -> TokenLogprobs:
        logprobs_NV = self.logits_VV[torch.from_numpy(before).long()].log_softmax(-1)
        chosen_N = logprobs_NV.gather(-1, torch.from_numpy(tokens).long()[:, None]).squeeze(-1)
        return TokenLogprobs(chosen_N, -(logprobs_NV.exp() * logprobs_NV).sum(-1))

    def forward(self, micro_batch: MicroBatch) -> TokenLogprobs:
        return self.logprobs(micro_batch.input_ids_BT[0][micro_batch.columns_N], micro_batch.targets_N)

    def evaluate(self, micro_batch: MicroBatch) -> TokenLogprobs:
        with torch.no_grad():
            return self.forward(micro_batch)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self, rate: float) -> float:
        return 1.0


def gradient(groups: Sequence[Experience], cap: int = 4096, **algorithm: Any) -> Tensor:
    engine = Bigrams()
    learner = Learner(cast(TrainingEngine, engine), settings(cap, **algorithm), Phases(), reference=Bigrams().evaluate)
    learner.learn(groups, [1] * len(groups), 1)
    assert engine.logits_VV.grad is not None
    return engine.logits_VV.grad


def gradient_of_cross_entropy(groups: Sequence[Experience], aggregation: str) -> Tensor:
    policy = Bigrams()
    terms = []
    for experience in groups:
        for sample in experience.group.samples:
            before = np.concatenate([experience.group.prompt_token_ids[-1:], sample.token_ids[:-1]])
            terms.append(-policy.logprobs(before, sample.token_ids).policy_logprobs_N)
    loss = {
        "token": torch.cat(terms).mean(),
        "sequence": torch.stack([each.mean() for each in terms]).mean(),
        "constant": torch.cat(terms).sum() / (len(terms) * 8),  # max_new_tokens
    }[aggregation]
    loss.backward()
    assert policy.logits_VV.grad is not None
    return policy.logits_VV.grad


@pytest.mark.parametrize("cap", [4096, 18])
@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "grpo", "aggregation": "token"},
        {"preset": "grpo", "aggregation": "sequence", "kl": {"coefficient": 0.1}},
        {"preset": "dr_grpo"},
        {"preset": "reinforce_pp", "kl": {"coefficient": 0.1, "where": "reward", "estimator": "k1"}},
        {"preset": "gspo"},
        {"preset": "icepop", "correction": "sequence_mask", "entropy_bonus": 0.01},
        {"preset": "a3po", "minibatches": 1},
    ],
    ids=lambda algorithm: algorithm["preset"] + algorithm.get("aggregation", ""),
)
def test_the_gradient_is_that_of_the_samples_plus_the_weighted_one_of_the_demonstrations(
    algorithm: dict[str, Any], cap: int
) -> None:
    groups = batch()
    for shown in ((1,), (0, 2), (1, 2, 3)):
        showing = demonstrated([groups[place] for place in shown])
        drawn = [group for place, group in enumerate(groups) if place not in shown]
        aggregation = settings(**algorithm).algorithm.aggregation
        of_samples, of_shown = gradient(drawn, **algorithm), gradient_of_cross_entropy(showing, aggregation)
        assert of_samples.abs().max() > 100 * ROUNDING
        mixed = gradient([*showing, *drawn], cap, imitation=WEIGHT, **algorithm)
        assert torch.allclose(mixed, of_samples + WEIGHT * of_shown, rtol=0.0, atol=ROUNDING)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "grpo", "kl": {"coefficient": 0.1, "target": 0.1}},
        {"preset": "ppo"},
        {"preset": "tis"},
        {"preset": "reinforce_pp", "epochs": 2},
    ],
    ids=lambda algorithm: algorithm["preset"],
)
def test_figures_of_samples_do_not_know_of_demonstrations(algorithm: dict[str, Any]) -> None:
    drawn, shown = batch()[:2], demonstrated(batch()[2:])
    mixed, alone = Rank(settings(imitation=WEIGHT, **algorithm)), Rank(settings(**algorithm))
    measured, expected = mixed.learn([*shown, *drawn]), alone.learn(drawn)
    once = algorithm.get("epochs", 1) == 1  # later, the demonstrations have moved the policy
    for name in OF_SAMPLES if once else ("reference_kl_loss",):
        assert measured.get(name) == pytest.approx(expected.get(name), abs=FORWARD), name
    assert measured["ce_loss"] > 0
    assert measured["loss"] == pytest.approx(sum(measured.get(f"{s}_loss", 0.0) for s in ("rl", "ce", "reference_kl")))
    if once:
        assert mixed.learner.kl_coefficient == pytest.approx(alone.learner.kl_coefficient, rel=1e-9)


@pytest.mark.parametrize("preset", ["grpo", "ppo", "reinforce_pp"])
def test_a_step_of_demonstrations_alone_has_no_figures_of_samples(preset: str) -> None:
    of = settings(preset=preset, imitation=WEIGHT, kl={"coefficient": 0.1})
    measured = Rank(of).learn(demonstrated(batch()))
    assert not {"kl_mean", "entropy", "ess", "reference_kl", "teacher_kl", "explained_variance"} & measured.keys()
    alone = Rank(settings(loss="cross_entropy")).learn(demonstrated(batch()))
    assert measured["loss"] == pytest.approx(WEIGHT * alone["loss"], abs=FORWARD)
    Rank(of).try_out(demonstrated(batch())[0])


def test_logprobs_of_other_models_are_asked_of_samples_only() -> None:
    def scored(e: Experience, logprob: float) -> Experience:
        own = [np.full(len(sample.token_ids), logprob, np.float32) for sample in e.group.samples]
        pairs = zip(e.group.samples, own, strict=True)
        samples = tuple(dataclasses.replace(sample, teacher_logprobs=each) for sample, each in pairs)
        group = dataclasses.replace(e.group, samples=samples)
        return dataclasses.replace(e, group=group, reference_logprobs=np.concatenate(own))

    drawn, shown = [scored(e, -3.7) for e in batch()[:2]], demonstrated(batch()[2:])
    of: dict[str, Any] = {"distillation": 0.5, "kl": {"coefficient": 0.1}, "reference": "reward"}
    measured, expected = (
        Rank(settings(imitation=WEIGHT, **of)).learn([*shown, *drawn]),
        Rank(settings(**of)).learn(drawn),
    )
    assert expected["teacher_kl"] != 0
    for name in ("rl_loss", "reference_kl_loss", "reference_kl", "teacher_kl"):
        assert measured[name] == pytest.approx(expected[name], abs=FORWARD), name


SEEN: list[tuple[int, int]] = []


def own_loss(*, policy_logprobs: Tensor, advantages: Tensor, lengths: Tensor, **others: Tensor) -> Tensor:
    SEEN.append((len(lengths), len(advantages)))
    return -advantages * policy_logprobs


def own_advantage(rewards: Any) -> Any:
    assert len(rewards) == 4, "a demonstration is a group of one sample"
    return rewards - rewards.mean()


def test_your_own_functions_see_samples_only() -> None:
    def single(e: Experience) -> Experience:
        group = dataclasses.replace(e.group, samples=e.group.samples[:1])
        return dataclasses.replace(e, group=group, rewards=e.rewards[:1], scores=e.scores[:1])

    of = settings(loss=f"{__name__}:own_loss", advantage=f"{__name__}:own_advantage", imitation=WEIGHT)
    trained = Rank(of)
    SEEN.clear()
    trained.learn([*demonstrated([single(e) for e in batch()[2:]]), *batch()[:2]])
    assert SEEN == [(8, 28)]


def test_a_split_forward_pass_keeps_which_samples_are_demonstrations() -> None:
    groups = [*demonstrated(batch()[:1]), *batch()[1:2]]
    of, engine = settings(imitation=WEIGHT), cast(TrainingEngine, Bigrams())
    (minibatch,), _ = lay_out(groups, [e.rewards for e in groups], [0, 0], 1, of, engine)
    (whole,) = minibatch.inputs
    halves = oom_split.halves(whole, minibatch.rows)
    places = [place for half in halves for place in half.batch.places_S.tolist()]
    shown = [bool(is_shown) for half in halves for is_shown in cast(Any, half.demonstrated_S)]
    assert sorted(zip(places, shown, strict=True)) == [(place, place < 4) for place in range(8)]
    tokens = [len(half.chosen(half.behavior_logprobs_N, demonstrated=True)) for half in halves]
    assert sum(tokens) == sum(len(sample.token_ids) for sample in groups[0].group.samples)


def test_a_replay_of_a_mixed_step_repeats_it_to_the_bit() -> None:
    groups = [*demonstrated(batch()[:2]), *batch()[2:]]
    first, second = Rank(settings(18, imitation=WEIGHT)), Rank(settings(18, imitation=WEIGHT))
    first.learn(groups)
    second.learn(groups, plan=first.learner.plan)
    before, after = first.weights(), second.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_steps_report_counts_demonstrations_apart() -> None:
    drawn, shown = batch(equal=(0,))[:2], demonstrated(batch()[2:])
    contexts = [0] * 8 + [1] + [0] * 7
    alone, mixed = (
        batch_figures(drawn, 3, {}, contexts[8:]),
        batch_figures([*shown, *drawn], 3, {}, contexts, is_mixed=True),
    )
    assert mixed.metrics == {**alone.metrics, "demonstrations": 2.0}
    assert (mixed.metrics["zero_std_groups"], mixed.metrics["masked_tokens"]) == (1.0, 1.0)
    assert mixed.lag_counts == alone.lag_counts
    assert (mixed.samples, mixed.tokens) == (alone.samples + 8, alone.tokens + 28)
    only = batch_figures(shown, 3, {}, is_mixed=True)
    assert (only.metrics, only.samples, only.lag_counts) == ({"demonstrations": 2.0}, 8, {})
