"""Decoder layers that ZeRO stage 3 gathers, frees and reduces as a whole instead of module by module: fewer, larger copies.

DeepSpeed calls them leaf modules. It reduces a leaf module's gradients once the backward pass has reached its first
inputs, and that once per call. So a layer must be called once in a forward pass, on hidden states that need gradients,
and all its weights must be trained and in no other layer; others are gathered module by module, also the mixtures that
DeepSpeed would mark by itself.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.services.trainer.batch.packing import micro_batch
from penstock.services.trainer.model.memory.recomputation import checkpointable

MOST_NUMBERS = 10**9
"""In a layer. DeepSpeed keeps as many gathered anyway (``stage3_max_live_parameters``)."""
_CHOSEN_BY_USERS = ("leaf_module", "stage3_module_granularity_threshold")


def mark(policy: Any, zero_optimization: Mapping[str, Any]) -> list[nn.Module]:
    """Mark the layers of a ``Policy`` or ``Critic`` for ``deepspeed.initialize``, and return them.

    None if ``zero_optimization`` (of trainer.deepspeed) says itself which modules, or if sequences go one by one. Takes
    a forward pass of one token.
    """
    if policy.trunk.packing != "rows" or any(name in zero_optimization for name in _CHOSEN_BY_USERS):
        return []
    from deepspeed.utils import set_z3_leaf_module

    candidates = list(_with_weights_of_their_own(policy))
    layers = _called_once(policy, candidates) if candidates else []
    for layer in layers:
        set_z3_leaf_module(layer, True)
    return layers


def _with_weights_of_their_own(policy: nn.Module) -> Iterator[nn.Module]:
    uses = Counter(id(weight) for _, weight in policy.named_parameters(remove_duplicate=False))
    inside: set[nn.Module] = set()
    for layer in checkpointable(policy):
        if layer in inside:
            continue
        inside.update(layer.modules())
        weights: list[Any] = list(layer.parameters())
        numbers = sum(getattr(weight, "ds_numel", weight.numel()) for weight in weights)
        if numbers <= MOST_NUMBERS and all(weight.requires_grad and uses[id(weight)] == 1 for weight in weights):
            yield layer


def _called_once(policy: Any, layers: Sequence[nn.Module]) -> list[nn.Module]:
    import deepspeed

    calls: dict[nn.Module, list[bool]] = {layer: [] for layer in layers}

    def note(layer: nn.Module, inputs: tuple[object, ...]) -> None:
        first = inputs[0] if inputs else None
        calls[layer].append(isinstance(first, Tensor) and first.requires_grad)

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    parts = [weight for weight in policy.parameters() if hasattr(weight, "ds_id")]
    try:
        with deepspeed.zero.GatheredParameters(parts, enabled=bool(parts)), torch.enable_grad():
            policy.trunk.hidden_states(micro_batch([]))
    finally:
        for hook in hooks:
            hook.remove()
    return [layer for layer, needed in calls.items() if needed == [True]]
