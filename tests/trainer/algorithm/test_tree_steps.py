"""Steps on trees: given tokens condition, and have no part in the loss or its denominators."""

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.batch.staleness import find_contexts, token_lags, trained_tokens
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, Float32Array, Int32Array, PolicyVersion, Sample, StepPlan
from tests.support import builders, teaching, tiny
from tests.support import trees as branching
from tests.support.tolerance import FORWARD, GRADIENT
from tests.trainer.algorithm.test_masked_tokens import FLAT
from tests.trainer.algorithm.test_update import Rank, batch, demonstrated, policy, settings, timeless

pytestmark = pytest.mark.usefixtures("one_rank")


def as_trees(groups: list[Experience], kept: int) -> list[Experience]:
    """Return the groups with all but the first ``kept`` tokens of each prompt as given tokens of every sample."""
    made = []
    for experience in groups:
        prompt, samples = experience.group.prompt_token_ids, []
        given = prompt[kept:]
        for sample in experience.group.samples:
            spans = sample.version_spans + np.array([[len(given), 0]], np.int32)
            segments = np.array([[0, -1, 0], [len(given), 0, 1]], np.int32)
            samples.append(
                dataclasses.replace(
                    sample,
                    token_ids=np.concatenate((given, sample.token_ids)),
                    behavior_logprobs=np.concatenate((np.zeros(len(given), np.float32), sample.behavior_logprobs)),
                    version_spans=np.concatenate((np.array([[0, spans[0, 1]]], np.int32), spans)),
                    segments=segments,
                )
            )
        group = dataclasses.replace(experience.group, prompt_token_ids=prompt[:kept], samples=tuple(samples))
        made.append(wire.decode(wire.encode(dataclasses.replace(experience, group=group)), Experience))
    return made


@functools.cache
def episodes(gap: float = 0.3, longer: int = 0) -> list[Experience]:
    """Return the groups of :func:`batch` with trees of several branches; every other group has no prompt of its own.

    The last group's first sample has ``longer`` segments more.
    """
    made = []
    for experience in batch():
        number = int(experience.group_id)
        generator = np.random.default_rng(100 + number)
        prompt = experience.group.prompt_token_ids if number % 2 else np.zeros(0, np.int32)
        opening, samples = generator.integers(3, tiny.VOCABULARY, 4).astype(np.int32), []
        for place in range(len(experience.group.samples)):
            more = longer if number + 1 == len(batch()) and not place else 0
            own_prompt = not len(prompt)
            bare = branching.tree(generator, tiny.VOCABULARY, opening, own_prompt=own_prompt, segments=5 + more)
            samples.append(dataclasses.replace(bare, behavior_logprobs=_behavior(prompt, bare, gap, generator)))
        group = dataclasses.replace(experience.group, prompt_token_ids=prompt, samples=tuple(samples))
        made.append(wire.decode(wire.encode(dataclasses.replace(experience, group=group)), Experience))
    return made


def _behavior(prompt: Int32Array, bare: Sample, gap: float, generator: np.random.Generator) -> Float32Array:
    logprobs = np.zeros(len(bare.token_ids), np.float32)
    with torch.no_grad():
        drawn_N = policy().eval()(micro_batch([PackedRow(prompt, (bare,), (0,))])).policy_logprobs_N.numpy()
    logprobs[bare.sampled] = drawn_N - gap * np.abs(generator.normal(size=len(drawn_N)))
    return logprobs


@pytest.mark.parametrize(
    "preset", ["grpo", "dr_grpo", "rloo", "gspo", "cispo", "reinforce_pp", "ppo", "tis", "a3po", "dpo"]
)
@pytest.mark.parametrize("kept", [0, 2])
def test_a_step_on_given_and_sampled_tokens_is_that_on_prompts_and_completions(preset: str, kept: int) -> None:
    contexts = () if preset == "dpo" else FLAT
    plain, trees = Rank(settings(preset=preset)), Rank(settings(preset=preset))
    measured, other = plain.learn(batch(), contexts=contexts), trees.learn(as_trees(batch(), kept), contexts=contexts)
    for name in ("loss", "grad_norm", "entropy_mean", "kl_mean"):
        if name in measured:
            assert other[name] == pytest.approx(measured[name], abs=FORWARD, rel=10 * GRADIENT), name


@pytest.mark.parametrize(
    "algorithm", [{"loss": "cross_entropy"}, {"advantage": "none", "distillation": 1.0, "distillation_top_k": 3}]
)
def test_demonstrations_and_distillation_learn_sampled_tokens_alone(algorithm: dict[str, Any]) -> None:
    losses = []
    for groups in (batch(), as_trees(batch(), 2)):
        made = demonstrated(groups) if "loss" in algorithm else teaching.with_tops(groups, 5, 3)
        rank = Rank(settings(**algorithm))
        held_out = rank.learner.figures_of(made) if "loss" in algorithm else {}
        measured = rank.learn(made)
        losses.append([measured["loss"], measured["grad_norm"], *held_out.values()])
    assert losses[1] == pytest.approx(losses[0], abs=FORWARD, rel=10 * GRADIENT)


def test_a_preference_between_trajectories_is_that_of_their_sampled_tokens() -> None:
    groups, margins, beta = list[Experience](), list[float](), 0.3
    for each in episodes():
        kept = dataclasses.replace(each.group, samples=each.group.samples[:2])
        row = PackedRow(kept.prompt_token_ids, kept.samples, (0, 1))
        reference = np.full(sum(len(sample.token_ids) for sample in kept.samples), -7.0, np.float32)
        is_sampled = np.concatenate([sample.sampled for sample in kept.samples])
        mine, reference[is_sampled] = (branching.branch_logprobs(tiny.model(seed), [row]).detach() for seed in (0, 1))
        gains = mine.numpy() - reference[is_sampled]
        first = kept.samples[0].sampled_tokens
        margins.append(beta * float(gains[:first].sum() - gains[first:].sum()))
        rewards = np.array([1.0, 0.0], np.float32)
        groups.append(Experience(kept, rewards, each.scores[:2], 4.0, 0.1, reference_logprobs=reference))
    assert min(margins) < 0 < max(margins)
    measured = Rank(settings(preset="dpo", dpo_beta=beta, reference="reward")).learn(groups)
    assert measured["loss"] == pytest.approx(np.mean([math.log1p(math.exp(-each)) for each in margins]), abs=FORWARD)


def test_trees_in_more_forward_passes_and_in_replays_train_the_same_tokens() -> None:
    groups = as_trees(batch(), 2)
    whole, cut = Rank(settings(preset="grpo")), Rank(settings(micro_batch_tokens=18, preset="grpo"))
    in_one_pass, other = whole.learn(groups, contexts=FLAT), cut.learn(groups, contexts=FLAT)
    assert in_one_pass["loss"] == pytest.approx(other["loss"], abs=FORWARD)
    assert in_one_pass["grad_norm"] == pytest.approx(other["grad_norm"], rel=10 * GRADIENT)
    assert cut.learner.plan is not None
    plan = wire.decode(wire.encode(cut.learner.plan), StepPlan)
    replayed = Rank(settings(micro_batch_tokens=18, preset="grpo"))
    assert timeless(replayed.learn(groups, plan=plan)) == timeless(other)
    assert all(torch.equal(tensor, cut.weights()[name]) for name, tensor in replayed.weights().items())


def test_the_stale_tokens_of_a_tree_are_its_oldest_sampled_ones_wherever_they_are() -> None:
    # sampled: places 3 4 of version 7, 7 of version 9, 8 9 of version 6; given tokens' versions are not read
    spans = np.array([[0, 1], [3, 7], [5, 1], [7, 9], [8, 6]], np.int32)
    tree = dataclasses.replace(builders.tree(), version_spans=spans)
    group = dataclasses.replace(builders.group(0), samples=(tree, builders.sample(version=9)))
    steps = {PolicyVersion(version): version for version in (1, 6, 7, 9)}
    assert [find_contexts(group, 10, steps, lag, "mask") for lag in (4, 3, 2, 0)] == [(0, 0), (2, 0), (4, 0), (5, 3)]
    assert np.flatnonzero(trained_tokens(tree, 2)).tolist() == [3, 4, 7]
    assert np.flatnonzero(trained_tokens(tree, 4)).tolist() == [7]
    assert find_contexts(group, 10, steps, 3, "sample") == (5, 0)
    lags = {version: 10 - step for version, step in steps.items()}
    assert token_lags(tree, lags, 2).tolist() == [3, 3, 1]
