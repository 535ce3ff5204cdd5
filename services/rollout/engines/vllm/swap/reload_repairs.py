"""Repair state that vLLM's layerwise reload silently leaves stale, because layers derive it only at the first load."""

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.services.rollout.engines.vllm.swap.copy_plan import written_by
from penstock.shared.errors import WeightsError


def process_tied(model: nn.Module) -> None:
    """Process modules that share an earlier weight, which reloads skip: a CPU's packed tied head would stay stale."""
    seen: set[int] = set()
    for module in model.modules():
        weight, method = module._parameters.get("weight"), getattr(module, "quant_method", None)
        if weight is None or method is None:
            continue
        if id(weight) in seen:
            method.process_weights_after_loading(module)
        seen.add(id(weight))


@contextlib.contextmanager
def packing_experts_again(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Repack a mixture's experts for the CPU: the existing kernel reads packed weights, reloaded ones are unpacked."""
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules() if device.type == "cpu"]
    kernels = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method, _ in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel


def fusing_gates(model: nn.Module) -> list[nn.Module]:
    """Return the mixtures of ``model`` that fuse router and shared-expert gates into one tensor at their first step."""
    return [module for module in model.modules() if hasattr(module, "_combined_gate_weight")]


def fuse_gates_again(mixtures: Iterable[nn.Module]) -> None:
    """Copy the gates into the tensor that was fused of them, as of a step: enqueued, and in inference mode."""
    for module in mixtures:
        layer: Any = module
        combined = layer._combined_gate_weight
        if combined is not None:
            with torch.inference_mode():
                torch.cat([layer.gate.weight, layer.shared_expert_gate.weight], dim=0, out=combined)


@contextlib.contextmanager
def counting_direct_writes(model: nn.Module) -> Iterator[None]:
    """Keep what loaders copy into parameters without ``weight_loader``, which a reload would lose.

    Models with attention sinks (GPT-OSS, MiMo-V2, MiniMax-M2) do so with ``parameter.copy_``.

    Raises WeightsError if a parameter is changed in another way, or in both.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    writes = DirectWrites(model, layerwise)
    original = layerwise.get_numel_loaded

    def numel_loaded(*arguments: Any) -> Any:
        with writes.indirectly():
            return original(*arguments)

    with mock.patch.object(layerwise, "get_numel_loaded", numel_loaded), writes:
        yield


class DirectWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes ``copy_`` into meta parameters of ``model`` to ``vllm``'s ``layerwise`` module."""

    def __init__(self, model: nn.Module, vllm: ModuleType) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._vllm: Any = vllm
        self._indirect = False
        self._owners: dict[int, tuple[nn.Module, str, torch.Tensor]] = {
            parameter.untyped_storage()._cdata: (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_meta
        }

    @contextlib.contextmanager
    def indirectly(self) -> Iterator[None]:
        """Ignore writes of a ``weight_loader``, which vLLM keeps."""
        self._indirect = True
        try:
            yield
        finally:
            self._indirect = False

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._indirect:
            for tensor in written_by(operation, args, kwargs or {}):
                owner = self._owners.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None
                if owner is not None:
                    self._keep(operation, owner, args)
                    return args[0]
        return operation(*args, **(kwargs or {}))

    def _keep(self, operation: Any, owner: tuple[nn.Module, str, torch.Tensor], args: Any) -> None:
        module, name, parameter = owner
        info: Any = self._vllm.get_layerwise_info(module)
        mixed = any(kept == name and "place" not in bound.arguments for kept, bound in info.loaded_weights)
        deferred = getattr(self._vllm, "is_deferred_attention_layer", lambda _: False)(module)
        if operation is not torch.ops.aten.copy_.default or mixed or deferred:
            raise WeightsError(
                f"vLLM cannot reload these weights layer by layer: its loader changes {name} of "
                f"{type(module).__name__} by {operation}, "
                f"so a swap would keep old weights; change policy.model, or rollout.engine"
            )
        target, value = args[0], args[1].expand(args[0].shape)
        setattr(parameter, "weight_loader", _copy_to_place)  # noqa: B010 (a tensor of vLLM's, which declares none)
        place = (tuple(target.shape), target.stride(), target.storage_offset())
        info.loaded_weights.append((name, inspect.signature(_copy_to_place).bind(parameter, value, place)))
        info.load_numel += value.numel()
        info.load_numel_total = self._vllm.get_layer_size(module)
        if info.load_numel >= info.load_numel_total:
            with self.indirectly():
                self._vllm._layerwise_process(module, info)


def _copy_to_place(param: torch.Tensor, loaded_weight: torch.Tensor, place: tuple[Any, Any, int]) -> None:
    param.data.as_strided(*place).copy_(loaded_weight)
