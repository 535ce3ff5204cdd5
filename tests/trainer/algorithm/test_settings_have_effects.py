"""Every setting of [algorithm] changes the update under every preset, or is refused there; so do those of AdamW."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from penstock.services.trainer.algorithm.update import Learner
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.phases import Phases
from penstock.shared.bus.messages import Experience, Sample
from penstock.shared.settings import Settings
from penstock.shared.settings.algorithm import AlgorithmSettings, BatchSettings, Preset
from penstock.shared.settings.rules import ADVANTAGES, LOSSES, OWN, CriticSettings, KlSettings
from penstock.shared.settings.trainer import TrainerSettings
from tests.support import tiny
from tests.support.teaching import with_tops
from tests.trainer.algorithm import test_mixture, test_update

pytestmark = pytest.mark.usefixtures("one_rank")

TOP_K = 3
ON: dict[str, dict[str, Any]] = {
    "KL in the loss": {"kl": {"coefficient": 0.3}},
    "KL in the reward": {"kl": {"coefficient": 0.3, "estimator": "k1"}},
    "a teacher": {"distillation": 0.5},
    "a teacher's top k": {"distillation": 0.5, "distillation_top_k": TOP_K},
    "a teacher alone": {"advantage": "none", "distillation": 0.5, "aggregation": "sequence"},
    "demonstrations": {"preset": "dr_grpo", "imitation": 0.3},
    "an entropy bonus": {"preset": "dr_grpo", "entropy_bonus": 0.1},
    "length": {"overlong": (0.5, 0.7)},
    "masked sequences": {"preset": "reinforce", "correction": "sequence_mask", "correction_band": (0.3, 3.0)},
    "a critic of several updates": {"preset": "ppo", "minibatches": 2, "critic": {"warmup_steps": 0}},
    "dpo with an entropy bonus": {"preset": "dpo", "entropy_bonus": 0.1},
    "demonstrations alone": {"loss": "cross_entropy"},
    "a loss of one's own": {"loss": f"{__name__}:squared"},
}
RUNS = {preset: {"preset": preset} for preset in get_args(Preset)} | ON

PARTS = ("clip", "correction_band", "overlong")
OTHERS: dict[str, tuple[Any, ...]] = {
    "advantage": (*(ADVANTAGES.keys() - {OWN}), f"{__name__}:doubled"),
    "distillation": (0.0, 0.2),
    "distillation_skew": (0.3,),
    "distillation_top_k": (0, TOP_K),
    "imitation": (0.0, 0.6),
    "loss": (*(LOSSES.keys() - {OWN}), f"{__name__}:squared"),
    "clip": ((0.01, 0.05, 0.3, 0.9), (0.01, 0.05, 0.3, 1.5, 9.0), (1.05,)),
    "correction": get_args(AlgorithmSettings.model_fields["correction"].annotation),
    "correction_band": ((0.1, 0.7, 0.9), (1.1, 1.5, 3.0, 9.0)),
    "proximal": ("behavior", "recomputed", "log_linear"),
    "aggregation": ("token", "sequence", "constant"),
    "entropy_bonus": (0.0, 0.2),
    "epochs": (1, 2),
    "minibatches": (1, 2),
    "overlong": ((0.0, 0.5, 0.9), (0.0, 0.2, 1.0)),
    "dpo_beta": (0.7,),
    "kl.coefficient": (0.0, 0.2),
    "kl.estimator": ("k1", "k2", "k3"),
    "critic.learning_rate": (1e-3,),
    "critic.warmup_steps": (0, 3),
    "critic.decay": (0.5,),
}
OF_TURNS = {"credit", "discount"}
"""They change nothing for completions of one turn: test_credit."""
PLACES = {"reference", "critic.model"}
"""Where a model is, or which: not what is computed with it. Refused where there is none."""


def squared(*, policy_logprobs: torch.Tensor, advantages: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
    return -advantages * policy_logprobs - 0.1 * policy_logprobs.square()


def doubled(rewards: Any) -> Any:
    return 2 * (rewards - rewards.mean())


class Table(test_mixture.Bigrams):
    """A policy of one matrix, and a row that all share, with plain gradient steps."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        moved = 0.3 * torch.randn(self.logits_VV.shape, generator=torch.Generator().manual_seed(seed)).double()
        self.logits_VV = (self.logits_VV.detach() + moved).requires_grad_(True)

    def step(self, rate: float) -> float:
        with torch.no_grad():
            assert self.logits_VV.grad is not None
            shared_V = self.logits_VV.grad.sum(0)  # so that a minibatch moves the tokens of all others
            self.logits_VV -= 2e4 * rate * (self.logits_VV.grad + shared_V)
        self.logits_VV.grad = None
        return 1.0


class Values(Table):
    """A critic of one vector: a value of each token, for what follows it."""

    def forward(self, micro_batch: Any) -> Any:
        return self.logits_VV[torch.from_numpy(micro_batch.input_ids_BT[0][micro_batch.columns_N]).long(), 0]


@functools.cache
def groups(*, demonstrations: bool, alone: bool) -> list[Experience]:
    """Return groups whose behavior is near the policy: with ratios on both sides of every bound, and of all lengths."""
    taught = with_tops(test_update.batch(equal=(1,), longer=6), 5, TOP_K)
    near = [_drawn_near(each) for each in taught]
    shown = test_update.demonstrated(near[3:])
    if alone:
        return test_update.demonstrated(near)
    return [*near[:3], *(shown if demonstrations else near[3:])]


def _drawn_near(experience: Experience) -> Experience:
    generator, policy, group = np.random.default_rng(experience.group_id), Table(), experience.group
    samples: list[Sample] = []
    for sample in group.samples:
        before = np.concatenate([group.prompt_token_ids[-1:], sample.token_ids[:-1]])
        logprobs = policy.logprobs(before, sample.token_ids).policy_logprobs_N.detach().numpy()
        moved = generator.normal(0, (0.02, 0.1, 0.3, 0.9)[len(samples)], len(logprobs))
        behavior = np.minimum(logprobs + moved, -1e-3).astype(np.float32)
        samples.append(dataclasses.replace(sample, behavior_logprobs=behavior))
    rewards = experience.rewards * np.float32(0.9) + np.float32(0.1)
    if experience.group_id == 0:
        rewards = np.array([0.2, 1.0, 0.6, 0.0], dtype=np.float32)
    prompt = dataclasses.replace(group.prompt, sampling=dataclasses.replace(group.prompt.sampling, max_new_tokens=8))
    drawn = dataclasses.replace(group, prompt=prompt, samples=tuple(samples))
    return dataclasses.replace(experience, group=drawn, rewards=rewards)


def learned(of: Settings) -> list[torch.Tensor]:
    """Return the weights after a step."""
    algorithm = of.algorithm
    policy, critic = Table(), Values(1) if algorithm.needs_critic else None
    learner = Learner(
        cast(TrainingEngine, policy), of, Phases(), cast(TrainingEngine, critic) if critic else None,
        Table(2).evaluate if algorithm.needs_reference else None,
    )  # fmt: skip
    batch = groups(demonstrations=algorithm.imitation > 0, alone=not of.kind.generates)
    learner.learn(batch, test_update.lags(batch, 2), 1)
    return [policy.logits_VV, *([critic.logits_VV] if critic else [])]


def changed(values: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    table, _, key = name.rpartition(".")
    return {**values, table: {**values.get(table, {}), key: value}} if table else {**values, key: value}


def accepted(values: dict[str, Any]) -> Settings | None:
    try:
        return test_update.settings(max_lag=2, **values)
    except ValidationError:
        return None


def alternatives(values: dict[str, Any], name: str) -> Iterator[list[Settings]]:
    """Yield what is accepted with another value of ``name``, of which one must change something: each other word, and the
    other numbers of each part of a pair.
    """
    usual = _value(test_update.settings(max_lag=2, **values), name)
    probes = [[value] for value in OTHERS[name]]
    if name in PARTS:
        probes = [
            [(*usual[:part], other, *usual[part + 1 :]) for other in others] for part, others in enumerate(OTHERS[name])
        ]
    for probe in probes:
        others = [accepted(changed(values, name, value)) for value in probe if value != usual]
        if some := [other for other in others if other is not None]:
            yield some


def _value(of: Settings, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), of.algorithm)


@pytest.mark.parametrize("run", RUNS)
def test_a_setting_changes_the_update_or_is_refused(run: str) -> None:
    values, idle = RUNS[run], []
    before = learned(test_update.settings(max_lag=2, **values))
    for name in OTHERS:
        for others in alternatives(values, name):
            if all(all(map(torch.equal, before, learned(other))) for other in others):
                idle.append((name, _value(others[0], name)))
    assert not idle, idle


def test_every_setting_is_tried_and_accepted_somewhere() -> None:
    nested: dict[str, Any] = {"kl": KlSettings, "critic": CriticSettings}
    every = {
        f"{table}.{name}" if table else name
        for table, of in {"": AlgorithmSettings, **nested}.items()
        for name in of.model_fields
    } - nested.keys()
    assert every == OTHERS.keys() | BatchSettings.model_fields.keys() | PLACES | OF_TURNS
    for name in OTHERS:
        assert any(next(alternatives(values, name), None) is not None for values in RUNS.values()), name


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"dpo_beta": 0.5}, r'expected algorithm.dpo_beta to be left out with algorithm.loss = "clip", found 0.5: .* it is for algorithm.loss "dpo"'),
        ({"kl": {"estimator": "k2"}}, "algorithm.kl.estimator to be left out with algorithm.kl.coefficient = 0, found \"k2\""),
        ({"reference": "reward"}, "algorithm.reference to be left out with algorithm.kl.coefficient = 0"),
        ({"critic": {"decay": 0.5}}, "algorithm.critic.decay to be left out"),
        ({"preset": "dpo", "aggregation": "constant"}, "algorithm.aggregation to be left out"),
        ({"preset": "dpo", "clip": (0.2, 0.28)}, "algorithm.clip.1 to be left out"),
        ({"preset": "tis", "clip": (0.2, 0.28)}, "in which the ratio is 1"),
        ({"preset": "cispo", "clip": (0.1, 4.0)}, "algorithm.clip.0 to be left out"),
        ({"preset": "a3po", "max_lag": 0, "clip": (0.1, 0.2)}, 'proximal = "log_linear" and algorithm.max_lag = 0'),
        ({"preset": "tis", "correction_band": (0.1, 2.0)}, "algorithm.correction_band.0 to be left out"),
        ({"correction_band": (0.5, 3.0)}, "which has no weights"),
        ({"overlong": (0.0, 2.0)}, "a share of 0"),
        ({"overlong": (0.5, 0.0)}, "a penalty of 0"),
        ({"overlong": (0.1, 1.0)}, r"expected algorithm.overlong to reach a token of sampling.max_new_tokens, found 0.1 of 8"),
        ({"advantage": "none", "distillation": 1.0, "overlong": (0.5, 1.0)}, "which reads no rewards"),
        ({"preset": "maxrl", "overlong": (0.5, 1.0)}, "the mean of rewards that must be at least 0"),
        ({"preset": "maxrl", "kl": {"coefficient": 0.1, "estimator": "k1"}}, 'another algorithm.kl.estimator than "k1"'),
    ],
)  # fmt: skip
def test_what_has_no_effect_or_the_opposite_is_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        test_update.settings(**values)


OF_OPTIMIZER: dict[str, Any] = {
    "learning_rate": 3e-3,
    "warmup_steps": 4,
    "schedule": "linear",
    "final_learning_rate": 5e-4,
    "adam_betas": (0.8, 0.9),
    "adam_eps": 1e-3,
    "weight_decay": 0.5,
    "max_grad_norm": 1e-3,
}
NOT_OF_UPDATES = {
    "ranks", "nodes", "node", "rendezvous", "zero_stage", "expert_parallel", "router_replay", "gpus", "optimizer", "micro_batch_tokens", "sequence_parallel", "packing", "kernels", "logits",
    "gradient_checkpointing", "offload", "deepspeed", "checkpoint_every_steps", "keep_last", "signing_key_file", "store",
}  # fmt: skip
"""Who computes, in how much memory, by which kernels, and what is kept: their tests are those of equal steps."""


def test_every_setting_of_the_optimizer_changes_the_weights() -> None:
    assert TrainerSettings.model_fields.keys() == OF_OPTIMIZER.keys() | NOT_OF_UPDATES

    def weights(**trainer: Any) -> dict[str, torch.Tensor]:
        plain = test_update.settings()
        run = plain.run.model_copy(update={"steps": 4})
        of = plain.model_copy(update={"run": run, "trainer": plain.trainer.model_copy(update=trainer)})
        rank = test_update.Rank(of)
        for step in (1, 2, 3):
            rank.learn(test_update.batch(), step)
        return rank.weights()

    linear = {"schedule": "linear"}
    plain, falling = weights(), weights(**linear)
    for name, value in OF_OPTIMIZER.items():
        others, before = (linear, falling) if name == "final_learning_rate" else ({}, plain)
        after = weights(**others, **{name: value})
        assert any(not torch.equal(tensor, after[key]) for key, tensor in before.items()), name


def test_the_test_itself_sees_a_setting_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AlgorithmSettings, "_unread", lambda *_: "")
    with pytest.raises(AssertionError, match="overlong"):
        test_a_setting_changes_the_update_or_is_refused("grpo")


def test_the_vocabulary_is_that_of_the_model() -> None:
    assert Table().logits_VV.shape == (tiny.VOCABULARY, tiny.VOCABULARY)
