"""The objective of a forward pass by ``[algorithm]``, by stream (``aggregation``): loss × correction, entropy, KL.

Demonstrations are taken out first: the loss of samples does not see them.
"""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from services.trainer.algorithm import functions
from services.trainer.algorithm.diagnostics import TokenFigures
from services.trainer.algorithm.loss import corrections, losses
from services.trainer.algorithm.loss.aggregation import Stream, of_stream, sequence_sums, total
from services.trainer.algorithm.loss.dpo import dpo
from services.trainer.algorithm.loss.kl import estimate
from services.trainer.algorithm.loss.top_k import top_k_kl
from services.trainer.batch.token_data import LossInputs
from services.trainer.model.layers.logits import TokenLogprobs
from shared.settings.algorithm import AlgorithmSettings


@dataclasses.dataclass(frozen=True, slots=True)
class Objective:
    sums: Mapping[Stream, Tensor]
    """Undivided."""
    figures: TokenFigures
    margins_P: Tensor | None = None


def objective(inputs: LossInputs, out: TokenLogprobs, algorithm: AlgorithmSettings, kl_coefficient: float) -> Objective:
    if algorithm.loss == "dpo":
        return _preferences(inputs, out, algorithm)
    if algorithm.is_supervised:
        return Objective({"ce": _imitated(inputs, out, algorithm)}, _unclipped(inputs, out, algorithm))
    if inputs.demonstrated_S is None:
        return _of_samples(inputs, out, algorithm, kl_coefficient)
    of_samples = _of_samples(inputs.without_demonstrations(), _drawn(inputs, out), algorithm, kl_coefficient)
    imitated = algorithm.imitation * _imitated(inputs, out, algorithm)
    return Objective({**of_samples.sums, "ce": imitated}, of_samples.figures)


def _drawn(inputs: LossInputs, out: TokenLogprobs) -> TokenLogprobs:
    """Return the logprobs of the tokens that a policy drew."""
    top_NK, others_N = out.top_logprobs_NK, out.others_logprobs_N
    return TokenLogprobs(
        inputs.chosen(out.policy_logprobs_N),
        inputs.chosen(out.entropy_N),
        None if top_NK is None else inputs.chosen(top_NK),
        None if others_N is None else inputs.chosen(others_N),
    )


def _imitated(inputs: LossInputs, out: TokenLogprobs, algorithm: AlgorithmSettings) -> Tensor:
    """Return the undivided cross-entropy of the demonstrations."""
    logprobs_N = inputs.chosen(out.policy_logprobs_N, demonstrated=True)
    return total(-logprobs_N, inputs.lengths(demonstrated=True), of_stream("ce", algorithm.aggregation))


def _of_samples(
    inputs: LossInputs, out: TokenLogprobs, algorithm: AlgorithmSettings, kl_coefficient: float
) -> Objective:
    assert inputs.advantages_N is not None
    anchor_N = _anchor(inputs, out.policy_logprobs_N, algorithm)
    loss = _loss(inputs, out, anchor_N, inputs.advantages_N, algorithm)
    loss_N, masked_N, losses_N = loss.loss_N, torch.zeros_like(loss.clipped_low_N), dict[Stream, Tensor]()
    if algorithm.correction != "none" and algorithm.correction != "ignored" and algorithm.correction != "ratio":
        weights_N = corrections.weights(
            anchor_N, inputs.behavior_logprobs_N, inputs.lengths_S,
            algorithm.correction, *algorithm.correction_band,
        )  # fmt: skip
        loss_N, masked_N = loss_N * weights_N, weights_N == 0.0
    if algorithm.kl.where == "loss" and kl_coefficient:
        assert inputs.reference_logprobs_N is not None
        kl_N = estimate(out.policy_logprobs_N, inputs.reference_logprobs_N, algorithm.kl.estimator)
        losses_N["reference_kl"] = kl_coefficient * kl_N
    if algorithm.distillation_top_k:
        losses_N["distillation"] = algorithm.distillation * _teacher_kl(inputs, out)
    if algorithm.entropy_bonus:
        losses_N["entropy"] = -algorithm.entropy_bonus * out.entropy_N
    losses_N["rl"] = loss_N
    figures = _figures(inputs, out, algorithm, (loss.clipped_low_N, loss.clipped_high_N, masked_N))
    how = {name: of_stream(name, algorithm.aggregation) for name in losses_N}
    return Objective({name: total(losses_N[name], inputs.lengths_S, how[name]) for name in losses_N}, figures)


def _anchor(inputs: LossInputs, policy_logprobs_N: Tensor, algorithm: AlgorithmSettings) -> Tensor:
    """Return the ratio's anchor; for a policy gradient the policy itself."""
    if algorithm.loss == "policy_gradient":
        return policy_logprobs_N.detach()
    if algorithm.proximal == "log_linear":
        return corrections.log_linear(inputs.behavior_logprobs_N, policy_logprobs_N, inputs.lags_N)
    if algorithm.proximal == "recomputed":
        assert inputs.proximal_logprobs_N is not None
        return inputs.proximal_logprobs_N
    return inputs.behavior_logprobs_N


def _loss(
    inputs: LossInputs, out: TokenLogprobs, anchor_N: Tensor, advantages_N: Tensor, algorithm: AlgorithmSettings
) -> losses.PolicyLoss:
    policy_N, (low, high, *dual) = out.policy_logprobs_N, algorithm.clip
    if ":" in algorithm.loss:
        return _own_loss(inputs, out, anchor_N, advantages_N, algorithm.loss)
    if algorithm.loss == "gspo":
        return losses.sequence_clipped_ratio(policy_N, anchor_N, advantages_N, inputs.lengths_S, low, high)
    if algorithm.loss == "cispo":
        return losses.clipped_weight(policy_N, anchor_N, advantages_N, high)
    if algorithm.loss == "policy_gradient":
        return losses.policy_gradient(policy_N, advantages_N)
    return losses.clipped_ratio(policy_N, anchor_N, advantages_N, low, high, *dual)


def _own_loss(
    inputs: LossInputs, out: TokenLogprobs, anchor_N: Tensor, advantages_N: Tensor, name: str
) -> losses.PolicyLoss:
    tensors = {
        "policy_logprobs": out.policy_logprobs_N,
        "anchor_logprobs": anchor_N,
        "behavior_logprobs": inputs.behavior_logprobs_N,
        "advantages": advantages_N,
        "entropy": out.entropy_N.detach(),
        "lags": inputs.lags_N,
        "lengths": inputs.lengths_S,
    }
    never_N = torch.zeros_like(advantages_N, dtype=torch.bool)
    return losses.PolicyLoss(functions.loss(name, tensors), never_N, never_N)


def _teacher_kl(inputs: LossInputs, out: TokenLogprobs) -> Tensor:
    policy_N, teacher = out.policy_logprobs_N, inputs.batch.teacher
    if teacher is None:
        assert policy_N.numel() == 0
        return torch.zeros_like(policy_N)
    assert out.top_logprobs_NK is not None
    assert out.others_logprobs_N is not None
    teacher_NK = torch.from_numpy(teacher.logprobs_NK).to(policy_N)
    return top_k_kl(teacher_NK, out.top_logprobs_NK, out.others_logprobs_N)


def _preferences(inputs: LossInputs, out: TokenLogprobs, algorithm: AlgorithmSettings) -> Objective:
    assert inputs.reference_logprobs_N is not None
    loss = dpo(
        sequence_sums(out.policy_logprobs_N, inputs.lengths_S),
        sequence_sums(inputs.reference_logprobs_N, inputs.lengths_S),
        algorithm.dpo_beta,
    )
    sums: dict[Stream, Tensor] = {"rl": loss.loss_P.sum()}
    if algorithm.entropy_bonus:
        sums["entropy"] = -algorithm.entropy_bonus * out.entropy_N.sum()
    return Objective(sums, _unclipped(inputs, out, algorithm), loss.margins_P)


def _unclipped(inputs: LossInputs, out: TokenLogprobs, algorithm: AlgorithmSettings) -> TokenFigures:
    """Return the figures of a loss without a ratio; those of demonstrations as if the policy had drawn them itself, and
    without a KL to the reference, whose estimate is over a policy's own tokens.
    """
    never_N = torch.zeros_like(out.policy_logprobs_N, dtype=torch.bool)
    figures = _figures(inputs, out, algorithm, (never_N, never_N, never_N))
    if inputs.demonstrated_S is None:
        return figures
    drawn_N = figures.policy_logprobs_N
    return dataclasses.replace(figures, behavior_logprobs_N=drawn_N, reference_kl_N=torch.zeros_like(drawn_N))


def _figures(
    inputs: LossInputs, out: TokenLogprobs, algorithm: AlgorithmSettings, taken: tuple[Tensor, Tensor, Tensor]
) -> TokenFigures:
    policy_N, entropy_N = out.policy_logprobs_N.detach(), out.entropy_N.detach()
    behavior_N, kl_N = inputs.behavior_logprobs_N, torch.zeros_like(policy_N)
    if inputs.reference_logprobs_N is not None:
        kl_N = estimate(policy_N, inputs.reference_logprobs_N, algorithm.kl.estimator)
    return TokenFigures(policy_N, behavior_N, entropy_N, *taken, reference_kl_N=kl_N)
