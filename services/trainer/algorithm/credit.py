"""Advantages of the turns of episodes, in numpy (``algorithm.credit = "turns"``).

With turn rewards r_u, the episode's reward R and T turns, turn t of episode i has::

    G_t = Σ_{u≥t} γ^(u−t) r_u + γ^(T−1−t) R
    A_t = G_t − mean of G_t over the other episodes that have a turn t, or of their G_0 if none has

The baseline depends on the other episodes only, so the gradient is unbiased. Subtracting the mean of *each* reward by the
index of its turn (MT-GRPO, arXiv:2505.11821) is not: it subtracts as many means as the policy lets turns follow.
"""

from collections.abc import Sequence

import numpy as np

from services.trainer.algorithm.advantages import Float64Array
from shared.bus.messages import Float32Array, Sample


def token_credit(samples: Sequence[Sample], rewards_S: Float32Array, discount: float) -> list[Float32Array]:
    """Return the advantages of all tokens of each sample of a group; 0 for given ones."""
    turns_S = [sample.turn_rewards if len(sample.turn_rewards) else np.zeros(_turns(sample)) for sample in samples]
    return [
        _of_tokens(sample, advantages_U)
        for sample, advantages_U in zip(samples, turn_advantages(turns_S, rewards_S, discount), strict=True)
    ]


def turn_advantages(
    turns_S: Sequence[Float32Array | Float64Array], rewards_S: Float32Array | Float64Array, discount: float
) -> list[Float64Array]:
    """Return the advantage of each turn of each episode, given its turns' rewards and its own.

    >>> [each.tolist() for each in turn_advantages([np.array([1.0, 0.0]), np.array([0.0])], np.array([2.0, 1.0]), 1.0)]
    [[2.0, 1.0], [-2.0]]
    """
    returns_S = [_returns(turns_U, float(reward), discount) for turns_U, reward in zip(turns_S, rewards_S, strict=True)]
    return [
        returns_U - [_baseline(returns_S[:place] + returns_S[place + 1 :], turn) for turn in range(len(returns_U))]
        for place, returns_U in enumerate(returns_S)
    ]


def _returns(turns_U: Float32Array | Float64Array, reward: float, discount: float) -> Float64Array:
    returns_U = turns_U.astype(np.float64)
    returns_U[-1] += reward
    for turn in reversed(range(len(returns_U) - 1)):
        returns_U[turn] += discount * returns_U[turn + 1]
    return returns_U


def _baseline(others_S: Sequence[Float64Array], turn: int) -> float:
    at_turn = [returns_U[turn] for returns_U in others_S if len(returns_U) > turn]
    values = at_turn or [returns_U[0] for returns_U in others_S]
    return float(np.mean(values)) if values else 0.0


def _turns(sample: Sample) -> int:
    return int((sample.segments[:, 2] == 1).sum()) if len(sample.segments) else 1


def _of_tokens(sample: Sample, advantages_U: Float64Array) -> Float32Array:
    if not len(sample.segments):
        return np.full(len(sample.token_ids), advantages_U[0], dtype=np.float32)
    is_sampled = sample.segments[:, 2] == 1
    advantages_K = np.zeros(len(is_sampled), dtype=np.float32)
    advantages_K[is_sampled] = advantages_U
    return np.repeat(advantages_K, np.diff(np.append(sample.segments[:, 0], len(sample.token_ids))))
