"""The critic: expected remaining reward before each token. Its head starts at 0."""

from typing import Any

import torch
from torch import Tensor, nn

from penstock.services.trainer.batch.packing import MicroBatch
from penstock.services.trainer.model.layers import attention, ulysses
from penstock.services.trainer.model.stochastic_layers import train_without_noise
from penstock.services.trainer.model.trunk import Packing, Trunk


class Critic(nn.Module):
    def __init__(
        self, trunk: Any, width: int, *, kind: attention.AttentionKind = "auto", packing: Packing = "auto"
    ) -> None:
        super().__init__()
        self.model = trunk
        self.trunk = Trunk(trunk, kind, packing)
        self.value_head = nn.Linear(width, 1, dtype=next(trunk.parameters()).dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def train(self, mode: bool = True) -> "Critic":
        super().train(mode)
        train_without_noise(self.model, mode)
        return self

    def forward(self, batch: MicroBatch) -> Tensor:
        hidden_ND = self.trunk.hidden_states(batch.computed)
        values_N1: Tensor = self.value_head(hidden_ND).float()
        return (values_N1 if batch.shard is None else ulysses.to_first(values_N1, batch.shard)).squeeze(-1)


def value_loss(values_N: Tensor, earlier_values_N: Tensor, returns_N: Tensor, clip: float) -> Tensor:
    """Return the critic's loss per token (N): half the squared error, clipped pessimistically.

    ``½ max((V − R)², (clip(V, V_earlier ± clip) − R)²)``, V_earlier before this step's updates; clip 0: not clipped
    (Engstrom et al. 2020, arXiv:2005.12729).
    """
    error_N = (values_N - returns_N).square()
    if clip:
        near_N = earlier_values_N + (values_N - earlier_values_N).clamp(-clip, clip)
        error_N = torch.maximum(error_N, (near_N - returns_N).square())
    return 0.5 * error_N
