"""KL divergence from the teacher to the policy, over the teacher's most probable tokens and one bucket of all others.

With the teacher's probabilities p and the policy's π, and ``o`` for all tokens but the teacher's k most probable::

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
