"""Make weights live in layers that vLLM quantised to FP8 when it loaded them, row by row.

::

    the loader, traced over stand-ins in checkpoint form ──▶ copies of rows ──▶ Rows: shadow ─▶ FP8 weight and scale

Only vLLM's scheme with one scale per output channel is proven: a row of a weight depends on that row of the checkpoint
alone, so fused projections need no buffer in which their parts meet. That rows are quantised as vLLM's own
``process_weights_after_loading`` does is checked with numbers when the plan is made.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.services.rollout.engines.vllm.swap.copies import Copy, CopyPlan, Region
from penstock.services.rollout.engines.vllm.swap.copy_plan import CopyPlanRefused

PROVEN = "Fp8PtpcOnlineLinearMethod"
"""vLLM's class for ``quantization = "fp8_per_channel"``."""
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_LEAST_SCALE = 1.0 / (_LARGEST * 512)


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a quantised layer and where a version holds them.

    Args:
        source: of the shadow, (rows, inputs).
        weight: float8 (rows, inputs), part of the live weight, transposed.
        scale: float32 (rows, 1), part of the live scales.
    """

    source: Region
    weight: torch.Tensor
    scale: torch.Tensor


def quantise(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Write ``rows`` (rows, inputs) as float8 into ``weight`` and their scales, (rows, 1), into ``scale``."""
    if rows.is_cuda:
        torch.ops._C.dynamic_per_token_scaled_fp8_quant(weight, rows, scale, None)
        return
    largest = torch.tensor(_LARGEST)  # a tensor divides; a number would be multiplied by its reciprocal
    scale.copy_((rows.abs().amax(dim=-1, keepdim=True).float() / largest).clamp_min(_LEAST_SCALE))
    weight.copy_((rows / scale).clamp_(-_LARGEST, _LARGEST).to(weight.dtype))


def quantised(model: nn.Module) -> dict[str, nn.Module]:
    """Return ``model``'s quantised layers by name."""
    return {name: module for name, module in model.named_modules() if method_of(module) == PROVEN}


def method_of(module: nn.Module) -> str:
    return type(getattr(module, "quant_method", None)).__name__


class QuantisingPlan(CopyPlan):
    """A plan whose copies into ``stand_ins``, of ``layers`` by name, quantise into the live layers instead."""

    def __init__(
        self, traced: CopyPlan, layers: Mapping[str, nn.Module], stand_ins: Mapping[str, torch.Tensor]
    ) -> None:
        places = {storage._cdata: number for number, storage in enumerate(traced._destinations)}
        by_storage = {places[tensor.untyped_storage()._cdata]: name for name, tensor in stand_ins.items()}
        for fill in traced.fills:
            if fill.destination.storage in by_storage:
                raise CopyPlanRefused(f"the loader fills a part of {by_storage[fill.destination.storage]}")
        self._rows: list[Rows] = []
        plain = []
        for copied in traced.copies:
            name = by_storage.get(copied.destination.storage)
            if name is None:
                plain.append(copied)
            else:
                self._rows.append(_rows(name, layers[name], stand_ins[name], copied))
        super().__init__(plain, traced.fills, traced._sources, traced._destinations)

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(rows.weight.nbytes + rows.scale.nbytes for rows in self._rows)

    @torch.no_grad()
    def replay(self) -> int:
        super().replay()
        for rows in self._rows:
            quantise(rows.source.on(self._sources[rows.source.storage]), rows.weight, rows.scale)
        return self.nbytes

    @torch.no_grad()
    def replay_part(self, part: int, buffer: torch.Tensor) -> int:
        copied = super().replay_part(part, buffer)
        for rows, source in self._from(part, buffer):
            quantise(source, rows.weight, rows.scale)
            copied += rows.weight.nbytes + rows.scale.nbytes
        return copied

    @torch.no_grad()
    def part_differences(self, part: int, buffer: torch.Tensor) -> int:
        return super().part_differences(part, buffer) + _differing(self._from(part, buffer))

    @torch.no_grad()
    def differences(self) -> int:
        pairs = [(rows, rows.source.on(self._sources[rows.source.storage])) for rows in self._rows]
        return super().differences() + _differing(pairs)

    def _from(self, part: int, buffer: torch.Tensor) -> list[tuple[Rows, torch.Tensor]]:
        shift = int(buffer.storage_offset())
        held = buffer.untyped_storage()
        return [
            (rows, dataclasses.replace(rows.source, storage=0, offset=rows.source.offset + shift).on(held))
            for rows in self._rows
            if rows.source.storage == part
        ]


def _differing(pairs: Sequence[tuple[Rows, torch.Tensor]]) -> int:
    different = 0
    for rows, source in pairs:
        weight, scale = torch.empty_like(rows.weight), torch.empty_like(rows.scale)
        quantise(source, weight, scale)
        same = torch.equal(weight.view(torch.uint8), rows.weight.view(torch.uint8)) and torch.equal(scale, rows.scale)
        different += not same
    return different


def _rows(name: str, layer: Any, stand_in: torch.Tensor, copied: Copy) -> Rows:
    """Return a copy of whole rows of ``stand_in`` (outputs, inputs) as one into ``layer``."""
    outputs, inputs = stand_in.shape
    weight, scale = layer.weight.data.t(), layer.weight_scale.data
    if weight.shape != stand_in.shape or not weight.is_contiguous() or scale.shape != (outputs, 1):
        raise CopyPlanRefused(f"vLLM pads or packs the quantised weight of {name}")
    row_bytes = inputs * stand_in.dtype.itemsize
    to, of = copied.destination, copied.source
    first, count = to.offset // row_bytes, to.nbytes // row_bytes
    whole = to.offset % row_bytes == 0 and to.nbytes % row_bytes == 0 and of.offset % stand_in.dtype.itemsize == 0
    if not (whole and to.dtype == of.dtype and to.contiguous and of.contiguous):
        raise CopyPlanRefused(f"the loader does not copy {name} in whole rows of {stand_in.dtype}")
    source = Region(of.storage, of.offset, stand_in.dtype, (count, inputs), (inputs, 1))
    return Rows(source, weight[first : first + count], scale[first : first + count])


@torch.no_grad()
def prove(layers: Mapping[str, Any]) -> None:
    """Check :func:`quantise` against vLLM's own processing, once per kernel and width.

    Raises CopyPlanRefused if a byte differs.
    """
    proven = set()
    for name, layer in layers.items():
        method: Any = copy.copy(layer.quant_method)
        inputs, device = layer.weight.shape[0], layer.weight.device
        key = (type(method), type(method.fp8_linear), inputs)
        if key in proven:
            continue
        proven.add(key)
        rows = _samples(inputs).to(device)
        processed: Any = copy.copy(layer)
        processed.__dict__.update(_parameters={"weight": nn.Parameter(rows, requires_grad=False)})
        processed.__dict__.pop("_already_called_process_weights_after_loading", None)
        method.fp8_linear = copy.copy(method.fp8_linear)
        method.process_weights_after_loading(processed)
        weight, scale = torch.empty_like(processed.weight.t()), torch.empty_like(processed.weight_scale)
        quantise(rows, weight, scale)
        same = torch.equal(weight.view(torch.uint8), processed.weight.t().view(torch.uint8))
        if not (same and torch.equal(scale, processed.weight_scale)):
            raise CopyPlanRefused(f"vLLM quantises {name} to other numbers than the swap would")


def _samples(inputs: int) -> torch.Tensor:
    """Return rows of bfloat16 from zero to large, (16, inputs)."""
    random = torch.randn(16, inputs, generator=torch.Generator().manual_seed(0))
    return (random * torch.logspace(-6, 3, 16)[:, None] * torch.tensor([0.0] + [1.0] * 15)[:, None]).bfloat16()


@contextlib.contextmanager
def stand_ins(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Give ``layers`` their weights in checkpoint form, on the meta device, for the block; yield them by layer's name."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    held = {name: dict(layer._parameters) for name, layer in layers.items()}
    made: dict[str, torch.Tensor] = {}
    try:
        for name, layer in layers.items():
            fresh: Any = restore_layer_refs(
                to_meta_tensor(get_layerwise_info(layer).restore_metadata[0]["weight"]), layer
            )
            fresh.weight_loader = _get_original_loader(fresh)
            made[name] = layer._parameters["weight"] = fresh
            layer._parameters.pop("weight_scale")
        yield made
    finally:
        for name, layer in layers.items():
            layer._parameters.clear()
            layer._parameters.update(held[name])
