"""Tokens that are context: they condition, and have no part in the loss or its denominators."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.trainer.algorithm.kinds import kind_of
from penstock.services.trainer.algorithm.minibatches import StepBatch, lay_out
from penstock.services.trainer.batch import oom_split
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.model.policy import Policy
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, PolicyVersion, StepPlan
from tests.support import tiny
from tests.support.tolerance import FORWARD, GRADIENT
from tests.trainer.algorithm.test_update import Rank, batch, lags, settings, timeless

pytestmark = pytest.mark.usefixtures("one_rank")

LENGTHS = (2, 5, 3, 4)
CONTEXTS = ((0, 2, 3, 0), (2, 0, 0, 1), (0, 0, 0, 0), (1, 4, 0, 3))
"""Of each sample of four groups; two samples are all context."""
FLAT = tuple(tokens for group in CONTEXTS for tokens in group)
PRESETS = ("grpo", "dr_grpo", "rloo", "maxrl", "gspo", "cispo", "reinforce_pp", "reinforce_pp_baseline")


def advantages(experience: Experience, preset: str) -> list[float]:
    """Return the advantages of all samples of a group, before any normalisation over the batch."""
    rewards = [float(reward) for reward in experience.rewards]
    mean, n = sum(rewards) / len(rewards), len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / n)
    scale = {"grpo": deviation + 1e-4, "gspo": deviation + 1e-4, "cispo": deviation + 1e-4}
    scale |= {"maxrl": mean + 1e-4, "rloo": (n - 1) / n}
    if preset == "reinforce_pp":
        return rewards
    return [(reward - mean) / scale.get(preset, 1.0) for reward in rewards]


def token_loss(preset: str, policy: torch.Tensor, behavior: float, advantage: float, sample_ratio: float) -> Any:
    """Return one token's loss."""
    ratio = torch.exp(policy - behavior)
    if preset == "rloo":
        return -advantage * policy * min(float(ratio.detach()), 2.0)
    if preset == "cispo":
        return -min(float(ratio.detach()), 5.0) * advantage * policy
    low, high = (0.2, 0.2)
    if preset == "gspo":
        ratio, low, high = sample_ratio * torch.exp(policy - policy.detach()), 3e-4, 4e-4
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def token_by_token(groups: list[Experience], preset: str) -> tuple[float, float, list[list[torch.Tensor]]]:
    """Return loss, gradient norm and each sample's logprobs with their gradients; one sequence at a time."""
    model = tiny.model(0).requires_grad_(True)
    samples: list[tuple[Any, list[torch.Tensor], int, float]] = []
    for experience, contexts in zip(groups, CONTEXTS, strict=True):
        prompt = experience.group.prompt_token_ids
        values = advantages(experience, preset)
        for sample, context, advantage in zip(experience.group.samples, contexts, values, strict=True):
            ids = torch.from_numpy(np.concatenate([prompt, sample.token_ids]).astype(np.int64))
            logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0].float(), -1)
            places = range(len(prompt), len(ids))
            taken = [logprobs[place - 1, ids[place]] for place in places]
            for each in taken:
                each.retain_grad()
            samples.append((sample, taken, context, advantage))
    trained = [advantage for _, taken, context, advantage in samples for _ in taken[context:]]
    mean, deviation = float(np.mean(trained)), float(np.std(trained))
    normalised = preset.startswith("reinforce_pp")
    total: Any = 0.0
    for sample, taken, context, advantage in samples:
        value = (advantage - mean) / (deviation + 1e-4) if normalised else advantage
        kept = list(zip(taken, sample.behavior_logprobs.tolist(), strict=True))[context:]
        logs = [float(policy.detach()) - behavior for policy, behavior in kept]
        ratio = math.exp(sum(logs) / len(logs)) if logs else 1.0
        losses = [token_loss(preset, policy, behavior, value, ratio) for policy, behavior in kept]
        total = total + sum(losses) / (len(losses) if preset == "gspo" and losses else 1)
    alive = sum(1 for _, taken, context, _ in samples if context < len(taken))
    constant = preset in ("dr_grpo", "rloo")
    loss = total / (alive * 8 if constant else alive if preset == "gspo" else len(trained))
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
    return float(loss.detach()), norm, [taken for _, taken, _, _ in samples]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_step_with_masked_tokens_is_that_of_a_reference_that_goes_token_by_token(preset: str) -> None:
    loss, norm, logprobs = token_by_token(batch(), preset)
    measured = Rank(settings(preset=preset)).learn(batch(), contexts=FLAT)
    assert measured["loss"] == pytest.approx(loss, abs=FORWARD)
    assert measured["grad_norm"] == pytest.approx(norm, rel=10 * GRADIENT)
    for taken, context in zip(logprobs, FLAT, strict=True):
        assert all(each.grad is None or float(each.grad) == 0.0 for each in taken[:context])


@pytest.mark.parametrize("preset", [*PRESETS, "ppo", "tis", "a3po"])
def test_what_a_masked_token_was_drawn_with_changes_no_bit_of_a_step(preset: str) -> None:
    original, other = Rank(settings(preset=preset)), Rank(settings(preset=preset))
    masked, changed = original.learn(batch(), contexts=FLAT), other.learn(spoiled(batch()), contexts=FLAT)
    assert timeless(masked) == timeless(changed)
    assert all(torch.equal(tensor, other.weights()[name]) for name, tensor in original.weights().items())
    assert timeless(Rank(settings(preset=preset)).learn(batch())) != timeless(masked)


def spoiled(groups: list[Experience]) -> list[Experience]:
    """Return the groups with other behavior logprobs of masked tokens."""
    made = []
    for experience, contexts in zip(groups, CONTEXTS, strict=True):
        samples = []
        for sample, context in zip(experience.group.samples, contexts, strict=True):
            behavior = sample.behavior_logprobs.copy()
            behavior[:context] = -9.0
            samples.append(dataclasses.replace(sample, behavior_logprobs=behavior))
        group = dataclasses.replace(experience.group, samples=tuple(samples))
        made.append(dataclasses.replace(experience, group=group))
    return made


@pytest.mark.parametrize("preset", ["grpo", "gspo", "ppo"])
def test_masked_tokens_do_not_depend_on_the_forward_passes_and_replays_mask_the_same(preset: str) -> None:
    whole, cut = Rank(settings(preset=preset)), Rank(settings(micro_batch_tokens=18, preset=preset))
    in_one_pass, other = whole.learn(batch(), contexts=FLAT), cut.learn(batch(), contexts=FLAT)
    assert in_one_pass["loss"] == pytest.approx(other["loss"], abs=FORWARD)
    assert in_one_pass["grad_norm"] == pytest.approx(other["grad_norm"], rel=10 * GRADIENT)
    assert cut.learner.plan is not None
    plan = wire.decode(wire.encode(cut.learner.plan), StepPlan)
    assert plan.contexts == FLAT
    replayed = Rank(settings(micro_batch_tokens=18, preset=preset))
    assert timeless(replayed.learn(batch(), plan=plan)) == timeless(other)


def test_trained_tokens_of_truncated_samples_keep_their_own_supports() -> None:
    group, contexts = batch()[0].group, (0, 2, 3, 0)
    samples = tuple(
        dataclasses.replace(
            sample,
            support_sizes=np.full(len(sample.token_ids), 2, np.int32),
            support_ids=np.stack([sample.token_ids, np.arange(len(sample.token_ids), dtype=np.int32)], 1).ravel(),
        )
        for sample in group.samples
    )
    whole = PackedRow(group.prompt_token_ids, samples, (0, 1, 2, 3))
    masked = dataclasses.replace(whole, contexts=contexts)
    expected, measured = (Policy(tiny.model(0))(micro_batch([row])).policy_logprobs_N for row in (whole, masked))
    kept = np.concatenate([np.arange(length) >= context for length, context in zip(LENGTHS, contexts, strict=True)])
    assert 0 < kept.sum() < len(kept)
    torch.testing.assert_close(measured, expected[torch.from_numpy(kept)], atol=FORWARD, rtol=0)


def truncated(groups: list[Experience]) -> list[Experience]:
    """Return the groups with supports, negative ones in every second group, whose last sample was not scored."""
    made = []
    for place, experience in enumerate(groups):
        samples = []
        for sample in experience.group.samples[: 3 if place % 2 else 4]:
            ids = [[token, (token + 1) % 10, (token + 2) % 10] for token in sample.token_ids.tolist()]
            sizes = np.full(len(ids), 3, np.int32)
            if place % 2:
                ids[0], sizes[0] = ids[0][1:], -2
            flat = np.array([token for row in ids for token in row], np.int32)
            samples.append(dataclasses.replace(sample, support_sizes=sizes, support_ids=flat))
        group, left = dataclasses.replace(experience.group, samples=tuple(samples)), len(samples)
        rewards, scores = experience.rewards[:left], experience.scores[:left]
        made.append(dataclasses.replace(experience, group=group, rewards=rewards, scores=scores))
    return [wire.decode(wire.encode(each), Experience) for each in made]


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_contexts_supports_and_unscored_samples_hold_together_in_any_forward_passes_and_in_replays(preset: str) -> None:
    contexts = tuple(tokens for place, group in enumerate(CONTEXTS) for tokens in group[: 3 if place % 2 else 4])
    whole, cut, again = (
        Rank(settings(micro_batch_tokens=tokens, preset=preset, entropy_bonus=0.01)) for tokens in (4096, 18, 18)
    )
    in_one_pass, other = (each.learn(truncated(batch()), contexts=contexts) for each in (whole, cut))
    assert in_one_pass["loss"] == pytest.approx(other["loss"], rel=FORWARD)
    assert in_one_pass["grad_norm"] == pytest.approx(other["grad_norm"], rel=10 * GRADIENT)
    assert timeless(again.learn(truncated(batch()), plan=cut.learner.plan)) == timeless(other)
    groups, rewards = truncated(batch()), [experience.rewards for experience in truncated(batch())]
    policy = whole.learner._policy
    (minibatch,), _ = lay_out(
        StepBatch(groups, rewards, lags(groups, 0), contexts), 1, kind_of(settings()), settings(), policy
    )
    for inputs in minibatch.inputs:
        halves = [policy.evaluate(half.batch) for half in oom_split.halves(inputs, minibatch.rows)]
        together = torch.cat([half.policy_logprobs_N for half in halves])
        torch.testing.assert_close(together, policy.evaluate(inputs.batch).policy_logprobs_N, atol=FORWARD, rtol=0)


def test_the_critic_learns_from_trained_tokens_alone_and_sees_the_whole_samples_return() -> None:
    with_critic = Rank(settings(preset="ppo", critic={"decay": 1.0}))
    assert with_critic.learner._critic is not None
    before = with_critic.weights()
    value_loss = with_critic.learn(batch(), contexts=FLAT)["value_loss"]
    # values begin at 0, so each trained token's loss is half the square of its sample's reward
    rewards = [float(reward) for experience in batch() for reward in experience.rewards]
    trained = [length - context for length, context in zip(LENGTHS * 4, FLAT, strict=True)]
    expected = sum(0.5 * reward**2 * n for reward, n in zip(rewards, trained, strict=True)) / sum(trained)
    assert value_loss == pytest.approx(expected, abs=FORWARD)
    assert any(not torch.equal(before[name], tensor) for name, tensor in with_critic.weights().items())


def test_a_loss_sees_the_lag_of_each_tokens_version() -> None:
    """Samples of one group began under different versions, and one went on under another; cut into forward passes."""
    data, spans = batch()[:1], ([[0, 1]], [[0, 3]], [[0, 1], [1, 3]], [[0, 2]])
    samples = [
        dataclasses.replace(sample, version_spans=np.array(rows, np.int32))
        for sample, rows in zip(data[0].group.samples, spans, strict=True)
    ]
    groups = [dataclasses.replace(data[0], group=dataclasses.replace(data[0].group, samples=tuple(samples)))]
    of_versions = {PolicyVersion(1): 4, PolicyVersion(2): 2, PolicyVersion(3): 0}
    for cap in (4096, 10):
        of = settings(micro_batch_tokens=cap)
        engine = Rank(of).engine
        (minibatch,), _ = lay_out(
            StepBatch(groups, [data[0].rewards], of_versions, (0, 0, 0, 1)), 1, kind_of(of), of, engine
        )
        lags_M = {
            int(place): lags_N.tolist()
            for inputs in minibatch.inputs
            for place, lags_N in zip(inputs.batch.places_S, inputs.lags_N.split(inputs.lengths_S.tolist()), strict=True)
        }
        assert lags_M == {0: [4, 4], 1: [0] * 5, 2: [4, 0, 0], 3: [2, 2, 2]}
    assert len(minibatch.inputs) > 1
