"""Choose the layers that keep activations; others recompute them (Chen et al. 2016, arXiv:1604.06174).

With ``trainer.gradient_checkpointing = "auto"``, as many of the last layers keep theirs as GPU memory allows, after
the logits. The first step keeps the last layer's, which costs nothing; each step's peak tells how many more fit, at
most four times as many. At ZeRO stage 3 a saved view is stored as its place, so that the weight can be released.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.services.trainer.model.memory.offloading import OffloadedInputs

_USED = 0.85
"""Usable share of the available memory."""
_GROWTH = 4
_RESERVE = 1.1
"""As attention copies keys."""


def enable(model: Any, setting: bool | str, device: str) -> None:
    """Enable checkpointing as ``setting`` says; ``auto``: on GPUs, if supported."""
    if setting is True or (
        setting == "auto" and device == "cuda" and getattr(model, "supports_gradient_checkpointing", False)
    ):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def is_enabled(policy: nn.Module) -> bool:
    return bool(_checkpointed(policy))


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Peak memory of a rank, in bytes, and tokens of the largest forward pass."""

    lasting: int
    peak: int
    tokens: int
    available: int
    """Including what this process holds."""

    def free(self, most_tokens: int) -> int:
        grown = self.lasting + (self.peak - self.lasting) * max(1.0, most_tokens / max(1, self.tokens))
        return int(_USED * self.available - grown)


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    layers: int
    logits: bool = False

    def next(self, free: int, layers: int, layer_bytes: float, logits_bytes: float) -> "Kept":
        """Return what to keep in ``free`` bytes; logits first, as they save more per byte."""
        if not layer_bytes:
            return self
        logits = self.logits or 0 < logits_bytes <= free
        room = free - (logits_bytes if logits > self.logits else 0)
        count = max(1, min(self.layers + int(room // layer_bytes), _GROWTH * self.layers, layers))
        return Kept(count, logits and (room >= 0 or self.layers > 1))


class Recomputation:
    """Decides before each step which layers keep activations, and whether logits are kept."""

    def __init__(self, policy: Any, most_tokens: int, device: torch.device, *, sharded: bool, automatic: bool) -> None:
        self._policy, self._most_tokens, self._device, self._sharded = policy, most_tokens, device, sharded
        self._layers = _checkpointed(policy)
        self._nested = {inner for layer in self._layers for inner in layer.modules() if inner is not layer}
        self.inputs = OffloadedInputs(device, len(self._layers))
        self._measures = automatic and bool(self._layers) and device.type == "cuda"
        self._tokens = self._peak = self._now = 0
        self._layer_bytes = 0.0
        """Per token, in the layer that keeps most."""
        self.keep(Kept(min(int(automatic), len(self._layers))))

    def keep(self, kept: Kept) -> None:
        """Let the last layers keep activations: their backward passes come first."""
        self.kept = kept
        self._policy.keeps_logits = kept.logits
        again = len(self._layers) - kept.layers
        for layer in self._layers[:again]:
            again_func = _computed_again if layer in self._nested else self.inputs.computed_again
            layer._gradient_checkpointing_func = again_func
        for layer in self._layers[again:]:
            layer._gradient_checkpointing_func = _Keeping(layer, self._sharded, self._note)

    @contextlib.contextmanager
    def watching(self, tokens: int = 0) -> Iterator[None]:
        """Record the peak memory of a forward or backward pass."""
        if tokens:
            self.inputs.begin()
        self._now = tokens or self._now
        self._tokens = max(self._tokens, tokens)
        yield
        if self._measures:
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self._device))

    def adapt(self) -> None:
        """Decide for the next step; collective, between steps."""
        if not self._measures:
            return
        free, _ = torch.cuda.mem_get_info(self._device)
        lasting, available = torch.cuda.memory_allocated(self._device), free + torch.cuda.memory_reserved(self._device)
        usage = MemoryUsage(lasting, self._peak, self._tokens, available)
        largest = self._most_tokens * _RESERVE
        layer, logits = self._layer_bytes * largest, getattr(self._policy, "logits_bytes", 0) * largest
        kept = self.kept.next(usage.free(self._most_tokens), len(self._layers), layer, logits)
        if (agreed := _agreed(kept, self._device)) != self.kept:
            self.keep(agreed)
            self._peak = self._tokens = 0

    def _note(self, kept_bytes: int) -> None:
        self._layer_bytes = max(self._layer_bytes, kept_bytes / max(1, self._now))


def _agreed(kept: Kept, device: torch.device) -> Kept:
    """Return the minimum over ranks, which must gather alike at ZeRO stage 3."""
    if dist.get_world_size() == 1:
        return kept
    least = torch.tensor([kept.layers, int(kept.logits)], dtype=torch.int64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    layers, logits = least.tolist()
    return Kept(layers, bool(logits))


def checkpointable(policy: nn.Module) -> list[Any]:
    """Return the layers that transformers can checkpoint, in their order, perhaps with layers inside others."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [layer for layer in policy.modules() if isinstance(layer, GradientCheckpointingLayer)]


def _checkpointed(policy: nn.Module) -> list[Any]:
    return [layer for layer in checkpointable(policy) if layer.gradient_checkpointing]


def _computed_again(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


class _Keeping:
    """Replaces torch's checkpointing of a layer; measures what it keeps."""

    def __init__(self, layer: nn.Module, sharded: bool, note: Callable[[int], None]) -> None:
        self._weights: Sequence[nn.Parameter] = list(layer.parameters())
        self._sharded, self._note = sharded, note
        self._counted = False

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        if not torch.is_grad_enabled() or (self._counted and not self._sharded):
            return function(*args)
        sizes = dict[int, int]()

        def pack(tensor: Tensor) -> "Tensor | _PartOfWeight":
            weight = self._weight_of(tensor)
            if weight is None:
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
                return tensor
            return _PartOfWeight(weight, tensor.shape, tensor.stride()) if self._sharded else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            result = function(*args)
        if not self._counted:
            self._note(sum(sizes.values()))
        self._counted = True
        return result

    def _weight_of(self, tensor: Tensor) -> nn.Parameter | None:
        place, count = tensor.data_ptr(), tensor.numel()
        return next(
            (weight for weight in self._weights if weight.data_ptr() == place and weight.numel() == count), None
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _PartOfWeight:
    weight: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]


def _unpack(saved: "Tensor | _PartOfWeight") -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return saved.weight.data.as_strided(saved.shape, saved.stride, saved.weight.data.storage_offset())
