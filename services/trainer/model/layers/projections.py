"""One matrix product for a layer's queries, keys and values.

The first of the three layers called computes all; weights stay in place.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_NAMES = ("q_proj", "k_proj", "v_proj")


def join(model: nn.Module) -> int:
    layers: list[list[Any]] = [[getattr(module, name, None) for name in _NAMES] for module in model.modules()]
    groups = [group for group in layers if _alike(group)]
    for group in groups:
        joined = _Joined(group)
        for number, layer in enumerate(group):
            layer.__dict__["forward"] = functools.partial(joined.run, number)
    return len(groups)


def _alike(layers: Sequence[Any]) -> bool:
    plain = all(type(layer) is nn.Linear and "forward" not in layer.__dict__ for layer in layers)
    return plain and len({(layer.in_features, layer.bias is None) for layer in layers}) == 1


class _Joined:
    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = layers
        self._of: tuple[Tensor, int, bool] | None = None
        self._waiting = dict[int, Tensor]()

    def run(self, number: int, given: Tensor) -> Tensor:
        layer = self._layers[number]
        if hasattr(layer.weight, "ds_id"):  # at ZeRO stage 3 a weight is whole only while its own layer runs
            return functional.linear(given, layer.weight, layer.bias)
        if not self._has(number, given):
            self._compute(given)
        output = self._waiting.pop(number)
        if not self._waiting:
            self._of = None
        return output

    def _has(self, number: int, given: Tensor) -> bool:
        if self._of is None or number not in self._waiting:
            return False
        of, version, graph = self._of
        return of is given and version == given._version and graph == torch.is_grad_enabled()

    def _compute(self, given: Tensor) -> None:
        biases: list[Any] = [layer.bias for layer in self._layers]
        bias = None if biases[0] is None else torch.cat(biases)
        weights: list[Tensor] = [layer.weight for layer in self._layers]
        whole = functional.linear(given, torch.cat(weights), bias)
        parts = torch.split(whole, [layer.out_features for layer in self._layers], -1)
        self._of, self._waiting = (given, given._version, torch.is_grad_enabled()), dict(enumerate(parts))
