"""Room for further tokens in a cache, as transformers' own copies all tokens for each one that it adds; and rows of layers that
keep a state instead of tokens.
"""

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

_GROWTH = 4
"""A full cache grows by this part of its length."""


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """A layer's keys and values (N × heads × tokens × size), which are the first tokens of larger tensors."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, layer: DynamicLayer) -> None:
        self.__dict__.update(layer.__dict__)
        self._rooms: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens; return all."""
        before, end = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        if not self._rooms or self._rooms[0].shape[-2] < end:
            self._rooms = [_larger(held, end + end // _GROWTH) for held in (self.keys, self.values)]
        for room, states in zip(self._rooms, (key_states, value_states), strict=True):
            room[..., before:end, :] = states
        self.keys, self.values = (room[..., :end, :] for room in self._rooms)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._rooms = []


def _larger(held: torch.Tensor, tokens: int) -> torch.Tensor:
    room = held.new_empty(*held.shape[:-2], tokens, held.shape[-1])
    room[..., : held.shape[-2], :] = held
    return room


def make_room(cache: object) -> None:
    """Give the layers of a filled cache that keep all tokens room for further ones."""
    layers = getattr(cache, "layers", [])
    layers[:] = [RoomyLayer(layer) if type(layer) is DynamicLayer else layer for layer in layers]


def select(cache: Any, rows_n: torch.Tensor) -> None:
    """Keep the rows ``rows_n`` of a filled cache, in order, with repetition."""
    for layer in getattr(cache, "layers", [cache]):
        if isinstance(layer, LinearAttentionCacheLayerMixin):  # its batch_select_indices, if any, leaves states out
            layer.reorder_cache(rows_n)
        else:
            layer.batch_select_indices(rows_n)
