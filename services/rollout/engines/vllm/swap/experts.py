"""Prove that a mixture's fused experts hold the loaded weights unchanged, so that a copy plan can write them.

Kernels want experts in forms of their own: packed for CPUs, with swapped halves or in blocks for FlashInfer, as they are
for Triton. So vLLM's own processing after loading runs on the live layer, with writes withheld::

    process_weights_after_loading ──▶ views; copies of bytes to their own place      unchanged
                                  ──▶ any other operation, or another parameter      changed: reloaded layer by layer
"""

import copy
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.services.rollout.engines.vllm.swap.copy_plan import CopyPlanRefused, place_of

METHOD = "UnquantizedFusedMoEMethod"
_UNCHANGED = frozenset({"TRITON", "BATCHED_TRITON"})
"""Backends of vLLM whose processing only calls PyTorch, which alone the proof observes."""


def changed(layer: Any) -> str:
    """Return why ``layer``'s live experts (of :data:`METHOD`) are not the loaded weights, or ""."""
    method: Any = layer.quant_method
    backend = getattr(getattr(method, "unquantized_backend", None), "name", "unknown")
    if backend not in _UNCHANGED:
        return f"has its experts in the form of vLLM's backend {backend}"
    if getattr(layer.moe_config.moe_parallel_config, "enable_eplb", True):
        return "moves its experts between ranks (expert parallel load balancing)"
    if getattr(method, "moe_kernel", None) is None:
        return "has no kernel yet: vLLM has not processed its experts"
    kernel = type(method.moe_kernel.fused_experts)
    if not inherits_processing(kernel, "FusedMoEExperts"):
        return f"has experts that {kernel.__name__} processes after loading"
    return _rewritten(layer)


def inherits_processing(kernel: type, base: str) -> bool:
    """Return whether ``kernel`` does no more after loading than vLLM's class ``base``, whose hook is empty."""
    hook = getattr(kernel, "process_weights_after_loading", None)
    return getattr(hook, "__qualname__", "") == f"{base}.process_weights_after_loading"


def _rewritten(layer: Any) -> str:
    held = dict(layer._parameters)
    data = {name: parameter.data for name, parameter in held.items()}
    withheld = _Withheld(data.values())
    try:
        with withheld:
            copy.copy(layer.quant_method).process_weights_after_loading(layer)
        same = all(layer._parameters.get(name) is parameter for name, parameter in held.items())
        moved = any(place_of(parameter.data) != place_of(data[name]) for name, parameter in held.items())
        return withheld.reason or ("" if same and not moved else "has its experts replaced by vLLM after loading")
    except Exception as error:  # noqa: BLE001 (vLLM's processing raises anything)
        return withheld.reason or f"has experts that vLLM cannot process again: {error!r}"
    finally:
        for name, parameter in held.items():
            parameter.data = data[name]
        layer._parameters.clear()
        layer._parameters.update(held)


class _Withheld(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations on ``live`` tensors except views, and copies to their own place, which it skips."""

    def __init__(self, live: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason = ""
        self._live = {tensor.untyped_storage()._cdata for tensor in live}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        touched = any(tensor.untyped_storage()._cdata in self._live for tensor in tensors)
        if not touched or operation.is_view:
            return operation(*args, **(kwargs or {}))
        if operation is torch.ops.aten.copy_.default and place_of(args[0]) == place_of(args[1]):
            return args[0]
        self.reason = self.reason or f"has its experts changed by vLLM after loading, by {operation}"
        raise CopyPlanRefused(self.reason)
