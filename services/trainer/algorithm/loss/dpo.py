"""DPO: a group's best and worst sample form a preference; with preference pairs a group is one pair.

Rafailov et al. 2023, DPO, arXiv:2305.18290, eq. 7; online, on the policy's own samples: Guo et al. 2024, arXiv:2402.04792::

    margin = (log π(best) − log ref(best)) − (log π(worst) − log ref(worst))        logprobs of whole samples
    loss   = −log σ(β · margin)
"""

import dataclasses

from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.shared.bus.messages import Float32Array


@dataclasses.dataclass(frozen=True, slots=True)
class PreferenceLoss:
    loss_P: Tensor
    margins_P: Tensor


def best_and_worst(rewards_S: Float32Array) -> tuple[int, int] | None:
    """Return the indices of a group's pair (the first of equals), or None if all rewards are equal."""
    best, worst = int(rewards_S.argmax()), int(rewards_S.argmin())
    return None if rewards_S[best] == rewards_S[worst] else (best, worst)


def dpo(policy_S: Tensor, reference_S: Tensor, beta: float) -> PreferenceLoss:
    """Return the loss of pairs, from logprobs of whole samples (nats) that alternate best, worst."""
    gain_S = policy_S - reference_S
    margins_P = beta * (gain_S[0::2] - gain_S[1::2])
    return PreferenceLoss(-logsigmoid(margins_P), margins_P.detach())
