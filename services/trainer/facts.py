"""What is known of the tokens of a micro-batch before they are trained on, on the device of the rank that trains them."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.trainer.packing import MicroBatch


@dataclasses.dataclass(slots=True)
class Facts:
    """Filled in the order of the fields; None where the run's algorithm does not need it.

    ``N`` trained tokens, sample after sample, ``lengths_S`` of them each. Logprobs are in nats.
    """

    batch: MicroBatch
    lengths_S: Tensor
    behavior_logprobs_N: Tensor
    lags_N: Tensor
    """Steps between the head and the oldest token of the token's group."""
    proximal_logprobs_N: Tensor | None = None
    """Under the weights before this step."""
    reference_logprobs_N: Tensor | None = None
    values_N: Tensor | None = None
    """The critic's, before this step's updates."""
    advantages_N: Tensor | None = None
    returns_N: Tensor | None = None


def of(batch: MicroBatch, lags_M: Sequence[int], device: torch.device) -> Facts:
    """Return what the micro-batch itself tells; ``lags_M`` is the lag of every sample of the batch."""
    lags_S = np.array([lags_M[place] for place in batch.places_S], dtype=np.float32)
    return Facts(
        batch=batch,
        lengths_S=torch.from_numpy(batch.lengths_S).to(device),
        behavior_logprobs_N=torch.from_numpy(batch.behavior_logprobs_N).to(device),
        lags_N=torch.from_numpy(np.repeat(lags_S, batch.lengths_S)).to(device),
    )
