"""What the loss of a policy's own tokens gets and returns.

``N`` trained tokens, ``lengths_S`` of each sample. Logprobs are in nats, ``π`` the trained policy's. The ratio
``ρ_t = exp(π_t − anchor_t)`` starts from the *anchor*: behavior or proximal logprobs. ``sg`` stops the gradient. A token is
*clipped* if the bound removed its gradient (for CISPO: limited its weight). Ratios are at most e^20 (``kl.bounded``), and
beyond have no gradient; GSPO's are those of whole sequences.
"""

import dataclasses

from torch import Tensor

from penstock.services.trainer.batch.token_data import LossInputs
from penstock.services.trainer.model.layers.logits import TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a forward pass."""

    inputs: LossInputs
    out: TokenLogprobs
    policy_N: Tensor
    anchor_N: Tensor
    advantages_N: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token, and whether its ratio was clipped below or above."""

    loss_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor
