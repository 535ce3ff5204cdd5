"""The advantage of every token, from rewards, KL penalties and values.

Ranks know all rewards, but hold parts of the samples; other batch-wide quantities are summed over ranks. ``M`` samples
of the batch, ``N`` tokens of a micro-batch. Advantages of demonstrations are never read.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch
import torch.distributed as dist

from penstock.services.trainer.algorithm import functions
from penstock.services.trainer.algorithm.advantages import (
    GROUP_ADVANTAGES,
    Float64Array,
    GroupAdvantage,
    centred,
    gae,
    group_advantages,
    normalise,
    token_credit,
    token_rewards,
)
from penstock.services.trainer.algorithm.diagnostics import moments
from penstock.services.trainer.algorithm.loss.aggregation import sequence_sums
from penstock.services.trainer.algorithm.loss.kl import estimate
from penstock.services.trainer.algorithm.rules.distillation import skewed, teacher_kl
from penstock.services.trainer.batch.token_data import LossInputs
from penstock.shared.bus.messages import Experience, Float32Array
from penstock.shared.settings.algorithm import AlgorithmSettings


def assign(
    inputs: Sequence[LossInputs],
    rewards: Sequence[Float32Array],
    algorithm: AlgorithmSettings,
    demonstrated: Collection[int] = (),
    batch: Sequence[Experience] = (),
) -> None:
    """Set every token's advantage (and return, with a critic) in this rank's ``inputs``; collective.

    ``rewards`` are the whole batch's, by group, of which ``demonstrated`` have none. Only turns' credit reads ``batch``.
    """
    cost = algorithm.kl.coefficient if algorithm.kl.in_reward else 0.0
    if algorithm.advantage == "none":
        for micro_batch in inputs:
            micro_batch.advantages_N = torch.zeros_like(micro_batch.behavior_logprobs_N)
    elif algorithm.advantage in GROUP_ADVANTAGES or ":" in algorithm.advantage:
        _by_group(inputs, rewards, algorithm, cost, demonstrated, batch)
    else:
        _by_token(inputs, rewards, algorithm, cost)
    if algorithm.distillation and not algorithm.distillation_top_k:
        for micro_batch in inputs:
            assert micro_batch.advantages_N is not None
            micro_batch.advantages_N -= algorithm.distillation * skewed(
                teacher_kl(micro_batch), algorithm.distillation_skew
            )


def _by_group(
    inputs: Sequence[LossInputs],
    rewards: Sequence[Float32Array],
    algorithm: AlgorithmSettings,
    cost: float,
    demonstrated: Collection[int],
    batch: Sequence[Experience],
) -> None:
    own = algorithm.advantage if ":" in algorithm.advantage else ""
    kind: GroupAdvantage = algorithm.advantage  # type: ignore[assignment]  # the caller looked
    if cost and inputs:
        sizes = np.cumsum([len(group) for group in rewards])
        penalties_M = (cost * _kl_of_samples(inputs, int(sizes[-1]), algorithm)).astype(np.float32)
        rewards = [r - p for r, p in zip(rewards, np.split(penalties_M, sizes[:-1]), strict=True)]
    if algorithm.credit == "turns":
        _by_turn(inputs, rewards, algorithm.discount, demonstrated, batch)
        return
    advantages_M = np.concatenate(
        [
            np.zeros_like(group)
            if place in demonstrated
            else functions.advantages(own, group)
            if own
            else group_advantages(group, kind)
            for place, group in enumerate(rewards)
        ]
    )
    for micro_batch in inputs:
        advantages_N = np.repeat(advantages_M[micro_batch.batch.places_S], micro_batch.batch.lengths_S)
        micro_batch.advantages_N = torch.from_numpy(advantages_N).to(micro_batch.behavior_logprobs_N.device)


def _by_turn(
    inputs: Sequence[LossInputs],
    rewards: Sequence[Float32Array],
    discount: float,
    demonstrated: Collection[int],
    batch: Sequence[Experience],
) -> None:
    advantages_M: list[Float32Array] = []
    for place, (experience, rewards_S) in enumerate(zip(batch, rewards, strict=True)):
        samples = experience.group.samples
        if place in demonstrated:
            advantages_M += [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
        else:
            advantages_M += token_credit(samples, rewards_S, discount)
    for micro_batch in inputs:
        trained_S = zip(micro_batch.batch.places_S, micro_batch.batch.trained_S, strict=True)
        advantages_N = np.concatenate(
            [np.zeros(0, np.float32), *(advantages_M[p][trained] for p, trained in trained_S)]
        )
        micro_batch.advantages_N = torch.from_numpy(advantages_N).to(micro_batch.behavior_logprobs_N.device)


def _kl_of_samples(inputs: Sequence[LossInputs], samples: int, algorithm: AlgorithmSettings) -> Float64Array:
    device = inputs[0].behavior_logprobs_N.device
    kl_M = torch.zeros(samples, dtype=torch.float64, device=device)
    for micro_batch in inputs:
        assert micro_batch.reference_logprobs_N is not None
        kl_N = estimate(micro_batch.behavior_logprobs_N, micro_batch.reference_logprobs_N, algorithm.kl.estimator)
        kl_M[torch.from_numpy(micro_batch.batch.places_S).to(device)] = sequence_sums(
            kl_N.double(), micro_batch.lengths_S
        )
    dist.all_reduce(kl_M)
    found_M: Float64Array = kl_M.cpu().numpy()
    return found_M


def _by_token(
    inputs: Sequence[LossInputs], rewards: Sequence[Float32Array], algorithm: AlgorithmSettings, cost: float
) -> None:
    if algorithm.advantage == "reinforce_pp_baseline":
        rewards_M = np.concatenate([centred(group) for group in rewards])
    else:
        rewards_M = np.concatenate(rewards).astype(np.float64)
    advantages = [_returns_to_go(micro_batch, rewards_M, algorithm, cost) for micro_batch in inputs]
    pairs = zip(inputs, advantages, strict=True)
    drawn_N = torch.cat([micro_batch.chosen(torch.from_numpy(advantages_N)) for micro_batch, advantages_N in pairs])
    mean, deviation = moments(drawn_N.to(inputs[0].behavior_logprobs_N.device))
    for micro_batch, advantages_N in zip(inputs, advantages, strict=True):
        device = micro_batch.behavior_logprobs_N.device
        if micro_batch.values_N is not None:
            micro_batch.returns_N = torch.from_numpy(advantages_N.astype(np.float32)).to(device) + micro_batch.values_N
        micro_batch.advantages_N = torch.from_numpy(normalise(advantages_N, mean, deviation)).to(device)


def _returns_to_go(
    micro_batch: LossInputs, rewards_M: Float64Array, algorithm: AlgorithmSettings, cost: float
) -> Float64Array:
    """Return unnormalised generalised advantages; without a critic, γ and λ are 1 and values 0."""
    lengths_S = micro_batch.batch.lengths_S
    penalties_N = np.zeros(int(lengths_S.sum()))
    if cost:
        assert micro_batch.reference_logprobs_N is not None
        kl_N = estimate(micro_batch.behavior_logprobs_N, micro_batch.reference_logprobs_N, algorithm.kl.estimator)
        penalties_N = cost * kl_N.double().cpu().numpy()
    rewards_N = token_rewards(rewards_M[micro_batch.batch.places_S], penalties_N, lengths_S)
    if micro_batch.values_N is None:
        return gae(rewards_N, np.zeros_like(rewards_N), lengths_S, 1.0, 1.0)
    values_N = micro_batch.values_N.double().cpu().numpy()
    return gae(rewards_N, values_N, lengths_S, 1.0, algorithm.critic.decay)
