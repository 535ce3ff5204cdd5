"""Distillation on the policy's own samples, as a term of the advantage or of the loss.

As an advantage: −(log π − log teacher) of each token (:func:`teacher_kl`), whose policy gradient is in the mean that of
KL(π ‖ teacher), as the mean of ∇ log π is 0 (Agarwal et al. 2024, GKD, arXiv:2306.13649; Lu 2025, "On-policy
distillation").

As a loss: the KL divergence from the teacher to the policy, over the teacher's most probable tokens and one bucket of all
others (:func:`top_k_kl`). With the teacher's probabilities p and the policy's π, and ``o`` for all tokens but the teacher's k most probable::

    KL(p ‖ π) ≥ Σ_k p_k (log p_k − log π_k) + p_o (log p_o − log π_o)          equal if the k are the whole vocabulary

The right side is the KL of two distributions over k + 1 outcomes: at least 0, and 0 only where π agrees with p on all of
them. Without the bucket it could be negative, and its minimum would be π_k = p_k / Σ p_k, without any other token. Its
gradient with respect to the logits of the k tokens is π_k − p_k, and of another token v: π_v − p_o π_v / π_o.

The direction is that of knowledge distillation, here on the policy's own samples: Agarwal et al. 2024, GKD,
arXiv:2306.13649 (on-policy data with the forward KL); verl's ``forward_kl_topk`` has the k terms and the same bucket
(``verl/trainer/distillation``). What the teacher finds impossible has no weight of its own, so no token needs a bound.

Shapes: ``N`` tokens, ``K`` most probable ones of the teacher. Logprobs are in nats.
"""

import torch
from torch import Tensor

from penstock.services.trainer.algorithm.loss.kl import MAX_LOG_RATIO
from penstock.services.trainer.batch.token_data import LossInputs
from penstock.services.trainer.model.layers.logits import TokenLogprobs


def teacher_kl(micro_batch: LossInputs) -> Tensor:
    """Return log π − log teacher of each token (N, nats), π before this step."""
    old_N = micro_batch.proximal_logprobs_N
    assert micro_batch.teacher_logprobs_N is not None
    return (micro_batch.behavior_logprobs_N if old_N is None else old_N) - micro_batch.teacher_logprobs_N


def skewed(teacher_kl_N: Tensor, skew: float) -> Tensor:
    """Return the cost of each token whose policy gradient is in the mean that of KL(π ‖ m), m = (1 − skew) teacher + skew π.

    m depends on π: log π − log m − skew (π / m − 1), from 0 where the teacher agrees to −log skew − 1 + skew where it finds
    the token impossible (skewed reverse KL: Ko et al. 2024, DistiLLM, arXiv:2402.03898).
    """
    if not skew:
        return teacher_kl_N
    share_N = (1 - skew) * torch.exp(-teacher_kl_N.clamp(min=-MAX_LOG_RATIO)) + skew
    return -torch.log(share_N) - skew * (1 / share_N - 1)


def kl_over_top_k(inputs: LossInputs, out: TokenLogprobs) -> Tensor:
    """Return :func:`top_k_kl` of a forward pass (N)."""
    policy_N, teacher = out.policy_logprobs_N, inputs.batch.teacher
    if teacher is None:
        assert policy_N.numel() == 0
        return torch.zeros_like(policy_N)
    assert out.top_logprobs_NK is not None
    assert out.others_logprobs_N is not None
    teacher_NK = torch.from_numpy(teacher.logprobs_NK).to(policy_N)
    return top_k_kl(teacher_NK, out.top_logprobs_NK, out.others_logprobs_N)


def top_k_kl(teacher_NK: Tensor, policy_NK: Tensor, policy_others_N: Tensor) -> Tensor:
    """Return the KL at each token (N), with a gradient through the policy's logprobs.

    Args:
        teacher_NK: the teacher's logprobs of its most probable tokens.
        policy_NK: the policy's logprobs of the same tokens.
        policy_others_N: of all others together; −∞ if there are no others, and then the teacher's are normalised.
    """
    mass_N = teacher_NK.exp().sum(-1)
    others_N = torch.where(policy_others_N.isneginf(), 0.0, (1.0 - mass_N).clamp(min=0.0))
    normalizer_N = torch.log(mass_N + others_N)
    logprobs_NK, share_N = teacher_NK - normalizer_N[:, None], others_N * torch.exp(-normalizer_N)
    top_N = (logprobs_NK.exp() * (logprobs_NK - policy_NK)).sum(-1)
    finite_N = torch.where(policy_others_N.isneginf(), 0.0, policy_others_N)
    return top_N + torch.xlogy(share_N, share_N) - share_N * finite_N
