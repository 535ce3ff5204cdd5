"""Every preset moves the weights, bitwise repeatably and independent of the forward passes."""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch

from penstock.services.trainer.algorithm import diagnostics
from penstock.services.trainer.algorithm.update import Learner
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.model import adapter
from penstock.services.trainer.model.critic import Critic
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.phases import Phases
from penstock.shared.bus.messages import (
    Experience,
    FinishReason,
    PolicyVersion,
    Purpose,
    RolloutGroup,
    Sample,
    StepPlan,
)
from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings
from penstock.shared.settings.algorithm import Preset
from tests.support import builders, tiny
from tests.support.tolerance import FORWARD, GRADIENT, ULPS

GROUPS = 4


pytestmark = pytest.mark.usefixtures("one_rank")


def settings(micro_batch_tokens: int = 4096, **algorithm: Any) -> Settings:
    return Settings.model_validate(
        {
            "policy": {"dtype": "float32"},
            "sampling": {"max_new_tokens": 8},
            "data": {"path": {"problems.jsonl": 1, "demonstrations.jsonl": 1}},
            "algorithm": {"groups_per_step": GROUPS, **algorithm},
            "trainer": {"learning_rate": 1e-3, "zero_stage": 0, "micro_batch_tokens": micro_batch_tokens},
        }
    )


def policy(entropy_gradient: bool = False, distils: bool = False) -> Policy:
    return Policy(tiny.model(0).requires_grad_(True), entropy_gradient=entropy_gradient, distils=distils).train()


class Rank:
    def __init__(self, of: Settings) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            algorithm = of.algorithm
            trained_policy = policy(algorithm.entropy_bonus > 0, algorithm.distillation_top_k > 0)
            trained_policy.model = adapter.add(trained_policy.model, of.policy)
            self.engine = TrainingEngine(trained_policy, of, "cpu")
            self.critic: TrainingEngine | None = None
            if algorithm.needs_critic:
                trunk = tiny.model(0).requires_grad_(True).get_decoder()
                self.critic = TrainingEngine(Critic(trunk, 32).train(), of, "cpu")
        reference = None
        if algorithm.needs_reference and not algorithm.reference_travels:
            reference = policy().eval().requires_grad_(False)
        self.learner = Learner(self.engine, of, Phases(), self.critic, reference)

    def learn(
        self,
        batch: list[Experience],
        step: int = 1,
        plan: StepPlan | None = None,
        contexts: Sequence[int] = (),
    ) -> dict[str, float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.learner.learn(batch, lags(batch), step, repeated=plan, contexts=contexts)

    def try_out(self, group: Experience, contexts: Sequence[int] = ()) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.learner.try_out([group], contexts)

    def whole(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.engine.tensors()}

    def weights(self) -> dict[str, torch.Tensor]:
        modules = [self.engine.policy] + ([self.critic.policy] if self.critic is not None else [])
        named = [(f"{n}.{name}", t) for n, module in enumerate(modules) for name, t in module.named_parameters()]
        return {name: tensor.detach().clone() for name, tensor in named}


def lags(batch: Sequence[Experience], of: int = 1) -> dict[PolicyVersion, int]:
    """Return the lags of a batch of versions that are all as old."""
    return dict.fromkeys({version for experience in batch for version in experience.group.versions}, of)


@functools.cache
def batch(gap: float = 0.3, equal: tuple[int, ...] = (), longer: int = 0) -> list[Experience]:
    """Groups with behavior logprobs ``gap`` from the policy's; those in ``equal`` have equal rewards. The last
    group's first sample is ``longer`` tokens longer.
    """
    groups = []
    for group in range(GROUPS):
        generator = np.random.default_rng(group)
        prompt = generator.integers(2, 40, 3 + group).astype(np.int32)
        lengths = (2 + (longer if group == GROUPS - 1 else 0), 5, 3, 4)
        tokens = [generator.integers(2, 40, n).astype(np.int32) for n in lengths]
        rewards = np.array([1, 0, 0, 1] if group not in equal else [1, 1, 1, 1], dtype=np.float32)
        made = builders.experience(group, tuple(rewards.tolist()))
        samples = tuple(_sample(prompt, ids, gap, generator) for ids in tokens)
        rollout = RolloutGroup(made.group.prompt, prompt, samples, "rollout-0", 1.0, 2.0)
        groups.append(Experience(rollout, rewards, made.scores, 4.0, 0.1))
    return groups


def _sample(prompt: Any, ids: Any, gap: float, generator: np.random.Generator) -> Sample:
    spans = np.array([[0, 0]], dtype=np.int32)
    bare = Sample(ids, np.zeros(len(ids), dtype=np.float32), spans, FinishReason.STOP, "")
    with torch.no_grad():
        logprobs = policy().eval()(micro_batch([PackedRow(prompt, (bare,), (0,))])).policy_logprobs_N.numpy()
    behavior = (logprobs - gap * np.abs(generator.normal(size=len(ids)))).astype(np.float32) if gap else logprobs
    return Sample(ids, behavior, spans, FinishReason.STOP, "")


def timeless(measured: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in measured.items() if name not in ("model_tflops_per_s", "mfu")}


VARIANTS: list[dict[str, Any]] = [
    *[{"preset": preset} for preset in get_args(Preset)],
    {"preset": "grpo", "kl": {"coefficient": 0.1, "estimator": "k1"}, "epochs": 2},
    {"preset": "reinforce_pp", "kl": {"coefficient": 0.1, "estimator": "k1"}},
    {"preset": "grpo", "kl": {"coefficient": 0.1}, "entropy_bonus": 0.01, "clip": (0.2, 0.2, 3.0)},
    {"preset": "ppo", "epochs": 2, "minibatches": 2, "aggregation": "sequence"},
    {"preset": "tis", "correction": "sequence_mask", "minibatches": 2},
    {"preset": "tis", "correction": "geometric_mask", "overlong": (0.5, 1.0)},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(str(x) for x in v.values())[:60])
def test_every_variant_moves_the_weights_and_a_replay_repeats_it_to_the_bit(variant: dict[str, Any]) -> None:
    first, second = Rank(settings(**variant)), Rank(settings(**variant))
    before, data = first.weights(), batch()
    for step in (1, 2):
        original, other = first.learn(data, step), second.learn(data, step)
        assert timeless(original) == timeless(other)
        assert all(np.isfinite(value) for value in original.values())
    after, again = first.weights(), second.weights()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) == len(before)
    assert all(torch.equal(after[name], again[name]) for name in after)


@pytest.mark.parametrize(
    "variant",
    [{"preset": p} for p in ("grpo", "dr_grpo", "gspo", "ppo", "dpo", "reinforce_pp")]
    + [{"preset": "rloo", "kl": {"coefficient": 0.1, "estimator": "k1"}}],
    ids=lambda v: v["preset"],
)
def test_many_small_forward_passes_make_the_same_step_as_one(variant: dict[str, Any]) -> None:
    data = batch()
    whole, cut = Rank(settings(**variant)), Rank(settings(micro_batch_tokens=18, **variant))
    in_one_pass, other = whole.learn(data), cut.learn(data)
    assert in_one_pass["loss"] == pytest.approx(other["loss"], abs=FORWARD)
    assert in_one_pass["grad_norm"] == pytest.approx(other["grad_norm"], rel=GRADIENT)
    assert in_one_pass["ess"] == pytest.approx(other["ess"], abs=FORWARD)


def test_where_behavior_is_the_policy_the_ratio_is_one_and_the_kl_zero() -> None:
    metrics = Rank(settings(preset="tis", kl={"coefficient": 0.1})).learn(batch(gap=0.0))
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=FORWARD)
    assert metrics["kl_mean"] == pytest.approx(0.0, abs=FORWARD**2)  # of second order in the log-ratio
    assert metrics["reference_kl"] == 0.0
    assert metrics["ess"] == pytest.approx(1.0, abs=FORWARD**2)
    assert (metrics["clip_fraction"], metrics["masked_fraction"]) == (0.0, 0.0)


def test_two_minibatches_and_two_epochs_are_four_updates() -> None:
    metrics = Rank(settings(preset="tis", minibatches=2, epochs=2)).learn(batch())
    assert metrics["updates"] == 4.0


def test_while_the_critic_warms_up_the_policy_stays_and_the_critic_learns() -> None:
    trained = Rank(settings(preset="ppo", critic={"warmup_steps": 1, "learning_rate": 1e-3}))
    before = trained.weights()
    metrics = trained.learn(batch(), step=1)
    after = trained.weights()
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("0."))
    assert any(not torch.equal(before[name], after[name]) for name in before if name.startswith("1."))
    assert metrics["learning_rate"] == 0.0
    trained.learn(batch(), step=2)
    assert any(not torch.equal(before[name], t) for name, t in trained.weights().items() if name.startswith("0."))


def test_the_critic_comes_to_explain_the_returns() -> None:
    trained = Rank(settings(preset="ppo", critic={"learning_rate": 3e-3, "decay": 1.0}))
    explained = [trained.learn(batch(), step)["explained_variance"] for step in range(1, 31)]
    assert explained[0] == pytest.approx(0.0, abs=ULPS)
    assert explained[-1] > 0.5


def test_a_group_without_a_preference_trains_nothing() -> None:
    trained = Rank(settings(preset="dpo"))
    before = trained.weights()
    metrics = trained.learn(batch(equal=(0, 1, 2, 3)))
    assert (metrics["loss"], metrics["grad_norm"]) == (0.0, 0.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in trained.weights().items())


def test_preferences_are_learned() -> None:
    trained = Rank(settings(preset="dpo"))
    accuracies = [trained.learn(batch(), step)["preference_accuracy"] for step in range(1, 16)]
    assert accuracies[-1] == 1.0


def test_tokens_outside_the_band_are_masked_and_counted() -> None:
    metrics = Rank(settings(preset="icepop", correction_band=(0.9, 1.1))).learn(batch(gap=0.5))
    assert 0.3 < metrics["masked_fraction"] < 1.0


def test_the_moments_are_those_of_all_values() -> None:
    assert diagnostics.moments(torch.tensor([1.0, 3.0])) == (2.0, 1.0)
    assert diagnostics.explained_variance(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0])) == pytest.approx(0.75)


def pair_of(experience: Experience) -> Experience:
    """Return a group of a best and a worst sample, so that preferences train all of its tokens."""
    samples = experience.group.samples[:2]
    return dataclasses.replace(
        experience, group=dataclasses.replace(experience.group, samples=samples), rewards=np.array([1, 0], np.float32),
        scores=experience.scores[:2],
    )  # fmt: skip


def demonstrated(groups: list[Experience]) -> list[Experience]:
    return [
        dataclasses.replace(
            e,
            group=dataclasses.replace(e.group, prompt=dataclasses.replace(e.group.prompt, purpose=Purpose.DEMONSTRATE)),
        )
        for e in groups
    ]


@pytest.mark.parametrize(
    "algorithm", [{"aggregation": "token"}, {"preset": "dr_grpo"}, {"preset": "gspo"}, {"preset": "dpo"}]
)
def test_entropy_and_kl_are_nats_per_token_with_any_loss(algorithm: dict[str, Any]) -> None:
    kl: dict[str, Any] = {} if algorithm.get("preset") == "dpo" else {"kl": {"coefficient": 0.1, "estimator": "k2"}}
    groups = [pair_of(each) for each in batch()] if not kl else batch()
    measured = Rank(settings(entropy_bonus=0.1, **algorithm, **kl)).learn(groups)
    assert measured["entropy_loss"] == pytest.approx(-0.1 * measured["entropy"], rel=GRADIENT)
    if kl:
        assert measured["reference_kl_loss"] == pytest.approx(0.1 * measured["reference_kl"], abs=FORWARD)
    assert measured["loss"] == pytest.approx(
        sum(measured[name] for name in measured if name.endswith("_loss")), abs=ULPS
    )


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "rloo", "maxrl", "dapo", "cispo", "tis", "dpo"])
def test_rewards_that_differ_for_one_text_move_no_weight(preset: str) -> None:
    def of_one_text(experience: Experience) -> Experience:
        samples = (experience.group.samples[1],) * 4
        return dataclasses.replace(experience, group=dataclasses.replace(experience.group, samples=samples))

    trained = Rank(settings(preset=preset))
    before = trained.weights()
    measured = trained.learn([of_one_text(each) for each in batch()])
    assert measured["grad_norm"] == 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in trained.weights().items())


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_each_stream_is_divided_by_its_own_tokens_however_they_are_packed(aggregation: str) -> None:
    chosen: dict[str, Any] = {"aggregation": aggregation, "kl": {"coefficient": 0.1}, "epochs": 2}
    sampled, shown = batch()[:2], demonstrated(batch()[2:])
    alone = Rank(settings(**chosen)).learn(sampled)
    logprobs = [
        policy().eval()(micro_batch([PackedRow(e.group.prompt_token_ids, (sample,), (0,))])).policy_logprobs_N.detach()
        for e in shown
        for sample in e.group.samples
    ]  # 8 samples of 28 tokens
    whole = {
        "token": sum(float(each.sum()) for each in logprobs) / 28,
        "sequence": sum(float(each.mean()) for each in logprobs) / 8,
        "constant": sum(float(each.sum()) for each in logprobs) / 28,  # max_new_tokens bounds samples
    }
    first = {name: value for name, value in chosen.items() if name != "epochs"}
    for cap in (4096, 18):
        mixed = Rank(settings(micro_batch_tokens=cap, imitation=0.5, **first)).learn([*sampled, *shown])
        assert mixed["ce_loss"] == pytest.approx(-0.5 * whole[aggregation], rel=GRADIENT)
        assert mixed["rl_loss"] == pytest.approx(Rank(settings(**first)).learn(sampled)["rl_loss"], abs=FORWARD)
        assert mixed["loss"] == pytest.approx(
            mixed["rl_loss"] + mixed["ce_loss"] + mixed["reference_kl_loss"], abs=ULPS
        )
    assert "ce_loss" not in alone
    assert alone["reference_kl_loss"] > 0  # of the second epoch: the policy has moved


@pytest.mark.parametrize(
    "algorithm",
    [{"preset": "dpo"}, {"preset": "grpo", "kl": {"coefficient": 0.1, "estimator": "k1"}}],
    ids=["dpo", "grpo"],
)
def test_reference_logprobs_that_came_with_their_groups_make_the_same_step(algorithm: dict[str, Any]) -> None:
    own, travelled = Rank(settings(**algorithm)), Rank(settings(reference="reward", **algorithm))
    assert travelled.learner._estimates.reference is None
    frozen = policy().eval()
    with torch.no_grad():
        came = [
            frozen(
                micro_batch([PackedRow(e.group.prompt_token_ids, e.group.samples, (0, 1, 2, 3))])
            ).policy_logprobs_N.numpy()
            for e in batch()
        ]
    groups = [dataclasses.replace(e, reference_logprobs=logprobs) for e, logprobs in zip(batch(), came, strict=True)]
    for step in (1, 2):
        from_own, other = timeless(own.learn(batch(), step)), timeless(travelled.learn(groups, step))
        if step == 1:  # policy and reference are still equal
            from_own["preference_accuracy"] = other["preference_accuracy"] = 0.0
        assert from_own == pytest.approx(other, abs=FORWARD)
    with pytest.raises(SettingsError, match="expected reference logprobs with group 0 in the journal, found none"):
        travelled.learn(batch(), 3)
