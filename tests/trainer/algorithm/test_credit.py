"""Credit of turns, by exact enumeration in float64."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.services.trainer.algorithm.advantages import (
    gae,
    group_advantages,
    token_credit,
    token_rewards,
    turn_advantages,
)
from penstock.shared.settings.algorithm import AlgorithmSettings
from tests.support import builders

CASES = [(0.7, 4, 0.0, 1.101), (0.7, 4, 3.0, 0.237), (0.5, 6, 2.0, 0.844)]
"""Chance to go on, most turns, reward of stopping, and the derivative of the mean return by the logit of that chance."""


def episodes(go: float, most: int, stop: float) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
    """Yield (probability, rewards, derivatives of the logprobs) of each episode: going on earns 1, ``stop`` ends it."""
    for turns in range(most):
        rewards, scores = np.array([1.0] * turns + [stop]), np.array([1 - go] * turns + [-go])
        yield go**turns * (1 - go), rewards, scores
    yield go**most, np.ones(most), np.full(most, 1 - go)


def true_gradient(go: float, most: int, stop: float) -> float:
    return float(sum(chance * rewards.sum() * scores.sum() for chance, rewards, scores in episodes(go, most, stop)))


@pytest.mark.parametrize("split", [0.0, 1.0], ids=["turn rewards", "an episode's reward"])
@pytest.mark.parametrize(("go", "most", "stop", "known"), CASES)
def test_turn_credit_has_the_policy_gradient_in_the_mean(
    go: float, most: int, stop: float, known: float, split: float
) -> None:
    """``split``: how much of the last turn's reward is the episode's."""
    expected = true_gradient(go, most, stop)
    assert expected == pytest.approx(known, abs=1e-3)
    gradient = 0.0
    for group in itertools.product(episodes(go, most, stop), repeat=3):
        chance = math.prod(each[0] for each in group)
        turns = [np.append(rewards[:-1], (1 - split) * rewards[-1]) for _, rewards, _ in group]
        own = np.array([split * rewards[-1] for _, rewards, _ in group])
        advantages = turn_advantages(turns, own, 1.0)
        gradient += chance * sum(float(a @ scores) for a, (_, _, scores) in zip(advantages, group, strict=True)) / 3
    assert gradient == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("go", "most", "stop", "known", "biased"), [(*a, b) for a, b in zip(CASES, (0.532, -1.064, -0.492), strict=True)]
)
def test_the_mean_of_each_turns_reward_is_no_baseline(
    go: float, most: int, stop: float, known: float, biased: float
) -> None:
    """The estimator that the module's text names: its mean is far from the gradient, even of large groups."""
    reached = [[(p, r[t]) for p, r, _ in episodes(go, most, stop) if len(r) > t] for t in range(most)]
    means = np.array([sum(p * r for p, r in pairs) / sum(p for p, _ in pairs) for pairs in reached])
    gradient = sum(
        p * scores[t] * (rewards - means[: len(rewards)])[t:].sum()
        for p, rewards, scores in episodes(go, most, stop)
        for t in range(len(rewards))
    )
    assert gradient == pytest.approx(biased, abs=5e-4)
    assert abs(gradient - known) > 0.5


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("go", "most", "stop", "known"), CASES)
def test_generalised_advantages_over_turns_have_the_policy_gradient_in_the_mean(
    go: float, most: int, stop: float, known: float, decay: float
) -> None:
    """Turns of one token, given tokens between them left out, the episode's reward at the last; exact values, and with a
    decay of 1 any.
    """
    left = [0.0]
    for _ in range(most):
        left.append(go * (1 + left[-1]) + (1 - go) * stop)
    gradient = 0.0
    for chance, rewards, scores in episodes(go, most, stop):
        values_N = np.array([t + left[most - t] for t in range(len(scores))])  # t was earned so far
        if decay == 1.0:
            values_N = np.arange(len(scores)) * 0.7 - 1.0
        rewards_N = token_rewards(rewards.sum()[None], np.zeros(len(scores)), np.array([len(scores)]))
        advantages_N = gae(rewards_N, values_N, np.array([len(scores)]), 1.0, decay)
        gradient += chance * float(advantages_N @ scores)
    assert gradient == pytest.approx(true_gradient(go, most, stop), abs=1e-12)


def test_discounted_returns_less_the_others_at_the_same_turn() -> None:
    # returns 1 + 0.5 (0 + 0.5 · (2 + 4)) = 2.5, 3, 6; of the other episode 1 + 0.5 · 2 = 2, 2: its third turn has its first's
    first, other = turn_advantages([np.array([1.0, 0.0, 2.0]), np.array([1.0, 0.0])], np.array([4.0, 2.0]), 0.5)
    assert (first.tolist(), other.tolist()) == ([0.5, 1.0, 4.0], [-0.5, -1.0])


def test_completions_have_the_advantages_of_rloo_and_given_tokens_none() -> None:
    rewards = np.array([1.0, 0.0, 0.5], np.float32)
    samples = [builders.sample(tokens=2), builders.sample(tokens=3), builders.sample(tokens=1)]
    credit = token_credit(samples, rewards, 0.9)
    assert [each[0] for each in credit] == pytest.approx(group_advantages(rewards, "rloo").tolist())
    assert [len(each) for each in credit] == [2, 3, 1]
    tree, plain = token_credit([builders.tree(), builders.sample()], np.array([2.0, 1.0], np.float32), 1.0)
    # rewards 0, 1, 0.5 and 2: returns 3.5, 3.5, 2.5, less 1
    assert tree.tolist() == [0, 0, 0, 2.5, 2.5, 0, 0, 2.5, 1.5, 1.5]
    assert plain.tolist() == [-2.5] * 3


@pytest.mark.parametrize("wrong", [{"advantage": "grpo"}, {"advantage": "gae"}, {"advantage": "grpo", "loss": "dpo"}])
def test_turn_credit_is_refused_beside_another_baseline(wrong: dict[str, str]) -> None:
    assert AlgorithmSettings(credit="turns", advantage="rloo", discount=0.9).credit == "turns"
    with pytest.raises(ValueError, match=r"algorithm\."):
        AlgorithmSettings.model_validate({"credit": "turns", **wrong})
    with pytest.raises(ValueError, match=r"algorithm\.discount"):
        AlgorithmSettings(discount=0.9)
