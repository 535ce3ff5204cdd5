"""Advantages from rewards, in numpy.

Within a group (``S`` samples of one prompt; ``r_i`` a sample's reward, mean and std over the group)::

    grpo      A_i = (r_i − mean) / (std + ε)          Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, eq. 4
    dr_grpo   A_i = r_i − mean                        Liu et al. 2025, arXiv:2503.20783, §3.2
    rloo      A_i = r_i − mean of the others          Ahmadian et al. 2024, arXiv:2402.14740
    maxrl     A_i = (r_i − mean) / mean               Tajwar et al. 2026, arXiv:2602.02710; rewards ≥ 0, else 0

Per token (``N`` tokens, ``lengths_S`` of each sample; ``r_t`` includes the sample's reward at its last token; ``V_t``
the critic's value before token t)::

    gae                    δ_t = r_t + γ V_{t+1} − V_t, A_t = Σ_l (γλ)^l δ_{t+l}  Schulman et al. 2015, arXiv:1506.02438
    reinforce_pp           A_t = Σ_{i≥t} r_i                                      Hu et al. 2025, arXiv:2501.03262
    reinforce_pp_baseline  the same, with the group's mean subtracted (there §3.2)

The last two are ``gae`` with V = 0, γ = λ = 1. All three are normalised over the batch. std divides by S.

An advantage never falls as the reward rises. ``r + c`` changes none of ``grpo``, ``dr_grpo``, ``rloo`` and
``reinforce_pp`` (``_baseline``); ``k r`` changes none of ``grpo``, ``maxrl`` and ``reinforce_pp`` but for ε, and scales
those of ``dr_grpo`` and ``rloo``.
"""

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from shared.bus.messages import Experience, Float32Array
from shared.settings.algorithm import AlgorithmSettings

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

GroupAdvantage = Literal["grpo", "dr_grpo", "rloo", "maxrl"]
GROUP_ADVANTAGES: frozenset[str] = frozenset(get_args(GroupAdvantage))

_EPSILON = 1e-4  # as in the reference implementations


def group_advantages(rewards_S: Float32Array, kind: GroupAdvantage) -> Float32Array:
    """Return one advantage per sample of a group (float32, S, or of many groups, … × S); exactly 0 for equal rewards.

    MaxRL's mean estimates a probability of success: a group whose mean is not positive has advantages of 0.

    >>> group_advantages(np.array([1, 0, 0, 1], dtype=np.float32), "dr_grpo").tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    centred_S, scale = centred(rewards_S), np.ones(1)
    if kind == "rloo":
        samples = rewards_S.shape[-1]
        scale = np.array(max(1, samples - 1) / samples)
    elif kind == "grpo":
        scale = centred_S.std(-1, keepdims=True) + _EPSILON
    elif kind == "maxrl":
        mean = rewards_S[..., :1] - centred_S[..., :1]
        scale = np.where(mean > 0, mean + _EPSILON, np.inf)
    return (centred_S / scale).astype(np.float32)


def centred(rewards_S: Float32Array) -> Float64Array:
    """Return the rewards minus their group's mean (float64, … × S); exactly 0 if all are equal.

    Subtracting r_0 first avoids rounding.
    """
    shifted_S = rewards_S.astype(np.float64) - rewards_S[..., :1].astype(np.float64)
    result_S: Float64Array = shifted_S - shifted_S.mean(-1, keepdims=True)
    return result_S


def has_signal(rewards_S: Float32Array) -> bool:
    """Say whether any two rewards of a group differ."""
    return bool((rewards_S != rewards_S[0]).any())


def overlong_penalty(lengths_S: IntArray, max_tokens: int, buffer_tokens: int) -> Float32Array:
    """Return DAPO's soft length penalty, 0 to −1 (Yu et al. 2025, arXiv:2503.14476, eq. 13).

    For length L: 0 up to ``max − buffer``, ``((max − buffer) − L) / buffer`` up to ``max``, then −1; always 0 without
    buffer.
    """
    if buffer_tokens == 0:
        return np.zeros(len(lengths_S), dtype=np.float32)
    over_S = (max_tokens - buffer_tokens) - lengths_S
    return np.clip(over_S / buffer_tokens, -1.0, 0.0).astype(np.float32)


def shaped_rewards(experience: Experience, algorithm: AlgorithmSettings) -> Float32Array:
    """Return the group's rewards minus length penalties (float32, S).

    If all completions are the same, each has their mean reward: a text has no advantage over itself. Rewards that
    differ (a judge's noise) would cancel up to rounding, and AdamW, which divides by the gradient's size, would move
    the weights by what is left.
    """
    max_tokens, samples = experience.group.prompt.sampling.max_new_tokens, experience.group.samples
    rewards_S, (share, penalty) = experience.rewards, algorithm.overlong
    if share:
        lengths_S = np.array([sample.sampled_tokens for sample in samples], dtype=np.int64)
        penalty_S = overlong_penalty(lengths_S, max_tokens, int(share * max_tokens))
        rewards_S = rewards_S + np.float32(penalty) * penalty_S
    if has_signal(rewards_S) and all(np.array_equal(sample.token_ids, samples[0].token_ids) for sample in samples):
        return np.full_like(rewards_S, rewards_S.mean())
    return rewards_S


def token_rewards(rewards_S: Float64Array, penalties_N: Float64Array, lengths_S: IntArray) -> Float64Array:
    """Return per-token rewards (float64, N): minus the penalty, plus the sample's at its last token."""
    rewards_N = -penalties_N
    rewards_N[np.cumsum(lengths_S) - 1] += rewards_S
    return rewards_N


def gae(
    rewards_N: Float64Array, values_N: Float64Array, lengths_S: IntArray, discount: float, decay: float
) -> Float64Array:
    """Return generalised advantages (float64, N), with γ ``discount`` and λ ``decay``.

    The value after a sample's last token is 0; ``lengths_S`` are at least 1.
    """
    rewards_ST, values_ST = _by_sample(rewards_N, lengths_S), _by_sample(values_N, lengths_S)
    advantages_ST = np.zeros_like(rewards_ST)
    following_S, value_after_S = np.zeros(len(lengths_S)), np.zeros(len(lengths_S))
    for t in reversed(range(rewards_ST.shape[1])):
        inside_S = t < lengths_S
        delta_S = rewards_ST[:, t] + discount * value_after_S - values_ST[:, t]
        following_S = np.where(inside_S, delta_S + discount * decay * following_S, 0.0)
        value_after_S = np.where(inside_S, values_ST[:, t], 0.0)
        advantages_ST[:, t] = following_S
    return advantages_ST[_inside(lengths_S)]


def normalise(values_N: Float64Array, mean: float, deviation: float) -> Float32Array:
    """Return ``(x − mean) / (deviation + ε)`` in float32, with the batch's moments."""
    return ((values_N - mean) / (deviation + _EPSILON)).astype(np.float32)


def _inside(lengths_S: IntArray) -> npt.NDArray[np.bool_]:
    inside: npt.NDArray[np.bool_] = np.arange(int(lengths_S.max(initial=0)))[None, :] < lengths_S[:, None]
    return inside


def _by_sample(values_N: Float64Array, lengths_S: IntArray) -> Float64Array:
    inside_ST = _inside(lengths_S)
    values_ST = np.zeros(inside_ST.shape, dtype=np.float64)
    values_ST[inside_ST] = values_N
    return values_ST
