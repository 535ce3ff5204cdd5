"""Properties of every preset's advantages over 10⁵ random groups: the sign of learning, and what a reward's scale does."""

import functools
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

from penstock.services.trainer.algorithm import advantages
from penstock.services.trainer.algorithm.advantages import GROUP_ADVANTAGES, group_advantages, normalise
from penstock.services.trainer.algorithm.rules.dpo import best_and_worst
from penstock.shared.settings.algorithm import AlgorithmSettings, Preset

GROUPS, SAMPLES, TOKENS = 100_000, 6, 3
EPSILON = 1e-4

Rewards = npt.NDArray[np.float32]


@functools.cache
def rewards() -> Rewards:
    """Return groups (G × S) of eight kinds: successes, signs, graded, near each other, with outliers, negative, huge, tiny."""
    lot = np.random.default_rng(0)
    drawn = lot.normal(size=(GROUPS, SAMPLES))
    kinds = (
        (lot.random(drawn.shape) < lot.random((GROUPS, 1))) * 1.0,
        np.sign(drawn),
        np.round(drawn * 4) / 4,
        1 + 1e-7 * np.round(drawn * 4),
        drawn * np.exp(3 * lot.normal(size=drawn.shape)),
        -np.abs(drawn),
        drawn * 1e30,
        drawn * 1e-30,
    )
    return np.choose(np.arange(GROUPS)[:, None] % len(kinds), kinds).astype(np.float32)


def of_preset(preset: Preset, rewards_GS: Rewards) -> Any:
    """Return the advantage of each sample's first token (G × S), as ``token_advantages`` computes it."""
    algorithm = AlgorithmSettings(preset=preset)
    if algorithm.advantage in GROUP_ADVANTAGES:
        return group_advantages(rewards_GS, algorithm.advantage)  # type: ignore[arg-type]
    values_GS = rewards_GS.astype(np.float64)
    if algorithm.advantage == "reinforce_pp_baseline":
        values_GS = advantages.centred(rewards_GS)
    critic, lengths = algorithm.critic, np.full(values_GS.size, TOKENS)
    of_critic = algorithm.advantage == "gae"
    rewards_N = advantages.token_rewards(values_GS.ravel(), np.zeros(values_GS.size * TOKENS), lengths)
    values_N = (
        np.repeat(np.random.default_rng(1).normal(size=len(rewards_GS)), rewards_GS.shape[1] * TOKENS) * of_critic
    )
    decay = critic.decay if of_critic else 1.0
    advantages_N = advantages.gae(rewards_N, values_N, lengths, 1.0, decay)
    normal_N = normalise(advantages_N, float(advantages_N.mean()), float(advantages_N.std()))
    return normal_N.reshape(*rewards_GS.shape, TOKENS)[..., 0]


@pytest.mark.parametrize("preset", get_args(Preset))
def test_within_a_group_an_advantage_never_falls_as_the_reward_rises(preset: Preset) -> None:
    if AlgorithmSettings(preset=preset).loss == "dpo":
        pairs = [(group, best_and_worst(group)) for group in rewards()]
        assert all(pair is None or group[pair[0]] > group[pair[1]] for group, pair in pairs)
        assert all(pair is not None or np.ptp(group) == 0 for group, pair in pairs)
        return
    found_GS = of_preset(preset, rewards())
    order_GS = np.argsort(rewards(), -1, kind="stable")
    steps_GS = np.diff(np.take_along_axis(found_GS, order_GS, -1), axis=-1)
    equal_GS = np.diff(np.take_along_axis(rewards(), order_GS, -1), axis=-1) == 0
    assert np.isfinite(found_GS).all()
    assert int((steps_GS < 0).sum()) == 0
    assert (steps_GS[equal_GS] == 0).all()
    assert (steps_GS > 0).mean() > 0.1


def graded() -> Rewards:
    """Return multiples of a quarter, of which sums and differences are exact; no group's are all equal."""
    drawn = np.random.default_rng(2).integers(0, 9, (1000, 8)).astype(np.float32) / np.float32(4)
    drawn[:, 0], drawn[:, 1] = 0.0, 2.25
    return drawn


SHIFTED = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
"""Presets that a constant added to all rewards does not change."""


@pytest.mark.parametrize("preset", SHIFTED)
def test_a_constant_added_to_all_rewards_changes_nothing(preset: Preset) -> None:
    before, after = of_preset(preset, graded()), of_preset(preset, graded() + np.float32(2))
    assert np.allclose(before, after, rtol=0, atol=1e-6)


def test_a_constant_changes_what_divides_by_the_mean() -> None:
    assert not np.allclose(of_preset("maxrl", graded()), of_preset("maxrl", graded() + np.float32(2)), atol=0.1)


@pytest.mark.parametrize("preset", ["grpo", "maxrl", "reinforce_pp", "reinforce_pp_baseline"])
def test_a_factor_of_all_rewards_changes_nothing_where_they_are_normalised(preset: Preset) -> None:
    before, after = of_preset(preset, graded()), of_preset(preset, graded() * np.float32(4))
    assert np.allclose(before, after, rtol=5 * EPSILON, atol=1e-6)  # deviations and means are at least a quarter


@pytest.mark.parametrize("preset", ["dr_grpo", "rloo", "reinforce"])
def test_a_factor_of_all_rewards_is_one_of_the_advantages_where_they_are_only_centred(preset: Preset) -> None:
    assert np.array_equal(4 * of_preset(preset, graded()), of_preset(preset, graded() * np.float32(4)))


def test_an_advantage_that_divides_by_a_mean_of_any_sign_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_where_negative(rewards_GS: Rewards, _: str) -> Any:
        return (advantages.centred(rewards_GS) / (rewards_GS.mean(-1, keepdims=True) + EPSILON)).astype(np.float32)

    monkeypatch.setattr(f"{__name__}.group_advantages", reversed_where_negative)
    with pytest.raises(AssertionError):
        test_within_a_group_an_advantage_never_falls_as_the_reward_rises("maxrl")
