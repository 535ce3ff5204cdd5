"""Laws of steps with demonstrations beside samples: each part's gradient is what it is alone, and so are its figures."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.services.trainer.algorithm.kinds import kind_of
from penstock.services.trainer.algorithm.loss.aggregation import STREAMS
from penstock.services.trainer.algorithm.minibatches import StepBatch, lay_out
from penstock.services.trainer.algorithm.update import Learner
from penstock.services.trainer.batch import oom_split
from penstock.services.trainer.batch.packing import TOKENS_ALONE, MicroBatch
from penstock.services.trainer.metrics import batch_figures, mixed_figures
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.layers.logits import TokenLogprobs
from penstock.services.trainer.model.routing.exchange import RouteExchange
from penstock.services.trainer.model.routing.replay import RouterReplay
from penstock.services.trainer.phases import Phases
from penstock.shared.bus.messages import Experience, Sample
from penstock.shared.model.logits import partition
from tests.support import tiny
from tests.support.teaching import with_tops
from tests.support.tolerance import FORWARD
from tests.trainer.algorithm.test_update import Rank, batch, demonstrated, lags, settings

pytestmark = pytest.mark.usefixtures("one_rank")

WEIGHT = 0.3
ROUNDING = 1e-12
"""Of a few hundred float64 terms, added in another order."""
OF_SAMPLES = (
    "rl_loss", "reference_kl_loss", "distillation_loss", "kl_mean", "kl_max", "entropy", "clip_fraction", "masked_fraction", "ess", "ratio_max",
    "logprob_gap", "reference_kl", "value_loss", "explained_variance", "teacher_kl", "kl_coefficient",
)  # fmt: skip


class Bigrams:
    """A policy of one float64 matrix, in place of a training engine."""

    ranks, device, shares_prompts, sizes, recovers = 1, torch.device("cpu"), True, TOKENS_ALONE, False
    policy = torch.nn.Identity()

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.logits_VV = torch.randn(tiny.VOCABULARY, tiny.VOCABULARY, generator=generator, dtype=torch.float64)
        self.logits_VV.requires_grad_(True)

    def all_logprobs(self, before: Any) -> Tensor:
        return self.logits_VV[torch.from_numpy(before).long()].log_softmax(-1)

    def logprobs(self, before: Any, tokens: Any) -> TokenLogprobs:
        logprobs_NV = self.all_logprobs(before)
        chosen_N = logprobs_NV.gather(-1, torch.from_numpy(tokens).long()[:, None]).squeeze(-1)
        return TokenLogprobs(chosen_N, -(logprobs_NV.exp() * logprobs_NV).sum(-1))

    def forward(self, micro_batch: MicroBatch) -> TokenLogprobs:
        before = micro_batch.input_ids_BT[0][micro_batch.columns_N]
        out, teacher = self.logprobs(before, micro_batch.targets_N), micro_batch.teacher
        if teacher is None:
            return out
        logits_NV, ids_NK = self.logits_VV[torch.from_numpy(before).long()], torch.from_numpy(teacher.ids_NK).long()
        tops = partition(logits_NV, ids_NK, torch.ones(len(before), dtype=torch.float64))
        return TokenLogprobs(out.policy_logprobs_N, out.entropy_N, *tops)

    def evaluate(self, micro_batch: MicroBatch) -> TokenLogprobs:
        with torch.no_grad():
            return self.forward(micro_batch)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self, rate: float) -> float:
        return 1.0


def learned(
    groups: Sequence[Experience], cap: int = 4096, contexts: Sequence[int] = (), **algorithm: Any
) -> tuple[Tensor, dict[str, float]]:
    """Return the gradient of a step, and its figures."""
    engine = Bigrams()
    learner = Learner(cast(TrainingEngine, engine), settings(cap, **algorithm), Phases(), reference=Bigrams().evaluate)
    measured = learner.learn(groups, lags(groups), 1, contexts=contexts)
    assert engine.logits_VV.grad is not None
    return engine.logits_VV.grad, measured


def gradient(groups: Sequence[Experience], cap: int = 4096, **algorithm: Any) -> Tensor:
    return learned(groups, cap, **algorithm)[0]


def of_samples_alone(policy: Bigrams, groups: Sequence[Experience], of: Callable[..., Tensor]) -> list[Tensor]:
    """Return ``of`` each sample, the tokens before its own, and their distributions."""
    terms = []
    for experience in groups:
        for sample in experience.group.samples:
            before = np.concatenate([experience.group.prompt_token_ids[-1:], sample.token_ids[:-1]])
            terms.append(of(sample, policy.all_logprobs(before)))
    return terms


def aggregated(terms: Sequence[Tensor], aggregation: str) -> Tensor:
    return {
        "token": torch.cat(list(terms)).mean(),
        "sequence": torch.stack([each.mean() for each in terms]).mean(),
        "constant": torch.cat(list(terms)).sum() / (len(terms) * 8),  # max_new_tokens
    }[aggregation]


def of_demonstrations(aggregation: str) -> str:
    """Return how demonstrations are aggregated, whose lengths max_new_tokens does not bound."""
    return "token" if aggregation == "constant" else aggregation


def cross_entropy(sample: Sample, logprobs_TV: Tensor) -> Tensor:
    return -logprobs_TV[torch.arange(len(sample.token_ids)), torch.from_numpy(sample.token_ids).long()]


def kl_to_most_probable(sample: Sample, logprobs_TV: Tensor) -> Tensor:
    """Return the KL from the teacher over its most probable tokens and all others as one outcome, position by position."""
    assert sample.teacher_top_ids is not None
    assert sample.teacher_top_logprobs is not None
    terms = []
    for ids_K, teacher_K, logprobs_V in zip(
        sample.teacher_top_ids.tolist(), sample.teacher_top_logprobs.tolist(), logprobs_TV, strict=True
    ):
        others = [token for token in range(tiny.VOCABULARY) if token not in ids_K]
        p_K = torch.tensor(teacher_K, dtype=torch.float64).exp()
        rest = 1 - p_K.sum()
        of_tops = (p_K * (p_K.log() - logprobs_V[ids_K])).sum()
        terms.append(of_tops + rest * (rest.log() - logprobs_V[others].exp().sum().log()))
    return torch.stack(terms)


def gradient_of_cross_entropy(groups: Sequence[Experience], aggregation: str) -> Tensor:
    policy = Bigrams()
    aggregated(of_samples_alone(policy, groups, cross_entropy), of_demonstrations(aggregation)).backward()
    assert policy.logits_VV.grad is not None
    return policy.logits_VV.grad


@pytest.mark.parametrize("cap", [4096, 18])
@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "grpo", "aggregation": "token"},
        {"preset": "grpo", "aggregation": "sequence", "kl": {"coefficient": 0.1}},
        {"preset": "dr_grpo"},
        {"preset": "reinforce_pp", "kl": {"coefficient": 0.1, "estimator": "k1"}},
        {"preset": "gspo"},
        {"preset": "icepop", "correction": "sequence_mask", "entropy_bonus": 0.01},
        {"preset": "a3po", "minibatches": 1},
        {"preset": "grpo", "aggregation": "constant", "distillation": 0.4, "distillation_top_k": 3},
        {"preset": "reinforce", "kl": {"coefficient": 0.1}, "distillation": 2.0, "distillation_top_k": 40},
    ],
    ids=lambda algorithm: "-".join(str(value) for value in algorithm.values()),
)
def test_the_gradient_is_that_of_the_samples_plus_the_weighted_one_of_the_demonstrations(
    algorithm: dict[str, Any], cap: int
) -> None:
    groups = with_tops(batch(), 5, algorithm.get("distillation_top_k", 3))
    for shown in ((1,), (0, 2), (1, 2, 3)):
        showing = demonstrated([batch()[place] for place in shown])
        drawn = [group for place, group in enumerate(groups) if place not in shown]
        aggregation = settings(**algorithm).algorithm.aggregation
        of_samples, of_shown = gradient(drawn, **algorithm), gradient_of_cross_entropy(showing, aggregation)
        assert of_samples.abs().max() > 100 * ROUNDING
        mixed = gradient([*showing, *drawn], cap, imitation=WEIGHT, **algorithm)
        assert torch.allclose(mixed, of_samples + WEIGHT * of_shown, rtol=0.0, atol=ROUNDING)


@pytest.mark.parametrize("cap", [4096, 18])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_teachers_most_probable_tokens_and_demonstrations_are_two_streams_each_over_its_own_count(
    aggregation: str, cap: int
) -> None:
    """Float64; the reference knows no packing: distributions of single positions, the teacher's float32 as they are."""
    taught, shown = with_tops(batch()[:2], 5, 3), demonstrated(batch()[2:])
    policy = Bigrams()
    kl = 0.7 * aggregated(of_samples_alone(policy, taught, kl_to_most_probable), aggregation)
    imitated = WEIGHT * aggregated(of_samples_alone(policy, shown, cross_entropy), of_demonstrations(aggregation))
    (kl + imitated).backward()
    assert policy.logits_VV.grad is not None
    only: dict[str, Any] = {"advantage": "none", "distillation": 0.7, "distillation_top_k": 3, "imitation": WEIGHT}
    measured, figures = learned([shown[0], *taught, shown[1]], cap, aggregation=aggregation, **only)
    assert torch.allclose(measured, policy.logits_VV.grad, rtol=0.0, atol=ROUNDING)
    assert measured.abs().max() > 1e6 * ROUNDING
    assert figures["distillation_loss"] == pytest.approx(float(kl.detach()), abs=ROUNDING)
    assert figures["ce_loss"] == pytest.approx(float(imitated.detach()), abs=ROUNDING)
    assert figures["rl_loss"] == 0.0
    assert figures["loss"] == pytest.approx(float((kl + imitated).detach()), abs=ROUNDING)


def test_contexts_of_taught_samples_are_theirs_also_beside_demonstrations() -> None:
    taught, shown = with_tops(batch()[:2], 5, 3), demonstrated(batch()[2:])
    only: dict[str, Any] = {"advantage": "none", "distillation": 0.7, "distillation_top_k": 3, "imitation": WEIGHT}
    contexts = [0, 2, 1, 3, 1, 0, 2, 0]
    mixed, _ = learned([*shown, *taught], 18, [0] * 8 + contexts, **only)
    alone, _ = learned(taught, 18, contexts, **{**only, "imitation": 0.0})
    of_shown = gradient_of_cross_entropy(shown, "token")
    assert torch.allclose(mixed, alone + WEIGHT * of_shown, rtol=0.0, atol=ROUNDING)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "grpo", "distillation": 0.5, "distillation_top_k": 3},
        {"preset": "grpo", "kl": {"coefficient": 0.1}},
        {"preset": "ppo"},
        {"preset": "tis"},
        {"preset": "reinforce_pp", "epochs": 2},
    ],
    ids=lambda algorithm: "-".join(str(value) for value in algorithm.values()),
)
def test_figures_of_samples_do_not_know_of_demonstrations(algorithm: dict[str, Any]) -> None:
    drawn, shown = with_tops(batch()[:2], 5, 3), demonstrated(batch()[2:])
    mixed, alone = Rank(settings(imitation=WEIGHT, **algorithm)), Rank(settings(**algorithm))
    measured, expected = mixed.learn([*shown, *drawn]), alone.learn(drawn)
    once = algorithm.get("epochs", 1) == 1  # later, the demonstrations have moved the policy
    for name in OF_SAMPLES if once else ("reference_kl_loss",):
        assert measured.get(name) == pytest.approx(expected.get(name), abs=FORWARD), name
    assert measured["ce_loss"] > 0
    assert measured["loss"] == pytest.approx(sum(measured.get(f"{s}_loss", 0.0) for s in STREAMS))


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "grpo"},
        {"preset": "ppo"},
        {"preset": "reinforce_pp"},
        {"preset": "grpo", "distillation": 0.5, "distillation_top_k": 3},
    ],
    ids=lambda algorithm: "-".join(str(value) for value in algorithm.values()),
)
def test_a_step_of_demonstrations_alone_has_no_figures_of_samples(algorithm: dict[str, Any]) -> None:
    of = settings(imitation=WEIGHT, kl={"coefficient": 0.1}, **algorithm)
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
    (minibatch,), _ = lay_out(
        StepBatch(groups, [e.rewards for e in groups], lags(groups, 0)), 1, kind_of(of), of, engine
    )
    (whole,) = minibatch.inputs
    halves = oom_split.halves(whole, minibatch.rows)
    places = [place for half in halves for place in half.batch.places_S.tolist()]
    shown = [bool(is_shown) for half in halves for is_shown in cast(Any, half.demonstrated_S)]
    assert sorted(zip(places, shown, strict=True)) == [(place, place < 4) for place in range(8)]
    tokens = [len(half.chosen(half.behavior_logprobs_N, demonstrated=True)) for half in halves]
    assert sum(tokens) == sum(len(sample.token_ids) for sample in groups[0].group.samples)


@pytest.mark.usefixtures("one_rank")
def test_demonstrations_which_no_router_drew_are_not_counted_as_routed_live() -> None:
    groups = [*demonstrated(batch()[:1]), *batch()[1:2]]
    learner = Learner(cast(TrainingEngine, Bigrams()), settings(imitation=WEIGHT), Phases())
    learner._routes = RouteExchange(RouterReplay((0,), decoder_layers=1, experts=4, top_k=2))
    measured = learner.learn(groups, lags(groups), 1)
    assert (measured["routed_live"], measured["replayed_fraction"]) == (4, 0), "the four samples of the other group"


@pytest.mark.parametrize("algorithm", [{}, {"distillation": 0.5, "distillation_top_k": 3}], ids=["", "taught"])
def test_a_replay_of_a_mixed_step_repeats_it_to_the_bit(algorithm: dict[str, Any]) -> None:
    groups = [*demonstrated(batch()[:2]), *with_tops(batch()[2:], 5, 3)]
    first, second = (Rank(settings(18, imitation=WEIGHT, **algorithm)) for _ in range(2))
    first.learn(groups)
    second.learn(groups, plan=first.learner.plan)
    before, after = first.weights(), second.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_steps_report_counts_demonstrations_apart() -> None:
    drawn, shown = batch(equal=(0,))[:2], demonstrated(batch()[2:])
    contexts = [0] * 8 + [1] + [0] * 7
    alone, mixed = (
        batch_figures(drawn, 3, {}, contexts[8:], most_tokens=99),
        mixed_figures([*shown, *drawn], 3, {}, contexts, most_tokens=99),
    )
    assert mixed.metrics == {**alone.metrics, "demonstrations": 2.0}
    assert (mixed.metrics["zero_std_groups"], mixed.metrics["masked_tokens"]) == (1.0, 1.0)
    assert mixed.lag_counts == alone.lag_counts
    assert (mixed.samples, mixed.tokens) == (alone.samples + 8, alone.tokens + 28)
    only = mixed_figures(shown, 3, {}, most_tokens=99)
    assert (only.metrics, only.samples, only.lag_counts) == ({"demonstrations": 2.0}, 8, {})
