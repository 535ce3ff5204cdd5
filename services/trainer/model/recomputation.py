"""Which layers keep their activations for the backward pass, and which compute them again (Chen et al. 2016, arXiv:1604.06174).

With ``trainer.gradient_checkpointing = "auto"`` as many of the last layers keep theirs as a GPU's memory has room for. The first step keeps
those of the last layer, which costs nothing: its backward pass comes first and needs them at once. What they take is measured
there, and the peak of each step says how many more would fit a forward pass of ``trainer.micro_batch_tokens``. Layers may differ,
so the number at most quadruples from step to step. It changes no result: the same operations run on the same numbers.

At ZeRO stage 3 a saved view of a weight would keep the whole weight. It is noted as a place in the weight instead, which is
whole again when the layer's backward pass runs.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_USED = 0.9
"""Share of the memory that is not other processes' which a step may need, by the forecast."""
_GROWTH = 4
_RESERVE = 1.1
"""What a layer takes is forecast with so much more, as its attention copies keys."""


def enable(model: Any, setting: bool | str, device: str) -> None:
    """Let the layers of ``model`` compute their activations again where ``setting`` says so; ``auto``: on a GPU, where they can."""
    if setting is True or (setting == "auto" and device == "cuda" and getattr(model, "supports_gradient_checkpointing", False)):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def is_enabled(policy: nn.Module) -> bool:
    """Return whether layers of ``policy`` compute their activations again."""
    return bool(_checkpointed(policy))


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What steps so far needed of a rank's memory, in bytes, and how many tokens their largest forward pass had."""

    lasting: int
    """What remains between steps: weights, optimizer, reference."""
    peak: int
    tokens: int
    kept_per_token: float
    """Of the layer that keeps most."""
    available: int
    """To this process, what it has included."""

    def room(self, most_tokens: int) -> int:
        """Return how many more layers could keep their activations in a forward pass of ``most_tokens``; less than 0: how many fewer."""
        if not self.tokens or not self.kept_per_token:
            return 0
        grown = self.lasting + (self.peak - self.lasting) * max(1.0, most_tokens / self.tokens)
        return int((_USED * self.available - grown) // (_RESERVE * self.kept_per_token * most_tokens))


class Recomputation:
    """Decides before each step which layers of ``policy`` keep their activations.

    Args:
        policy: whose layers :func:`enable` was called on.
        most_tokens: of a forward pass.
        device: whose memory it is.
        sharded: whether a weight is whole only while its layer runs.
        automatic: whether any layer keeps its activations.
    """

    def __init__(
        self, policy: nn.Module, most_tokens: int, device: torch.device, *, sharded: bool, automatic: bool
    ) -> None:
        self._most_tokens, self._device, self._sharded = most_tokens, device, sharded
        self._layers = _checkpointed(policy) if automatic else []
        self._measures = bool(self._layers) and device.type == "cuda"
        self._tokens = self._peak = self._now = 0
        self._kept_per_token = 0.0
        self.keep(min(1, len(self._layers)))

    def keep(self, count: int) -> None:
        """Let the last ``count`` layers keep their activations: their backward passes come first and make room."""
        self.kept = count
        for layer in self._layers[: len(self._layers) - count]:
            layer._gradient_checkpointing_func = _computed_again
        for layer in self._layers[len(self._layers) - count :]:
            layer._gradient_checkpointing_func = _Kept(layer, self._sharded, self._note)

    @contextlib.contextmanager
    def watching(self, tokens: int = 0) -> Iterator[None]:
        """Note how much memory a forward pass of ``tokens``, or a backward pass, needs at most."""
        self._now = tokens or self._now
        self._tokens = max(self._tokens, tokens)
        yield
        if self._measures:
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self._device))

    def adapt(self) -> None:
        """Decide for the next step; every rank calls it between steps."""
        if not self._measures:
            return
        free, _ = torch.cuda.mem_get_info(self._device)
        lasting, available = torch.cuda.memory_allocated(self._device), free + torch.cuda.memory_reserved(self._device)
        usage = Usage(lasting, self._peak, self._tokens, self._kept_per_token, available)
        count = _agreed(next_count(self.kept, len(self._layers), usage.room(self._most_tokens)), self._device)
        if count != self.kept:
            self.keep(count)
            self._peak = self._tokens = 0

    def _note(self, kept_bytes: int) -> None:
        self._kept_per_token = max(self._kept_per_token, kept_bytes / max(1, self._now))


def next_count(kept: int, layers: int, room: int) -> int:
    """Return how many of ``layers`` keep their activations where ``kept`` did, and ``room`` says how many more could."""
    return max(1, min(kept + room, _GROWTH * kept, layers))


def _agreed(count: int, device: torch.device) -> int:
    """Return the least of all ranks: at ZeRO stage 3 they gather weights in the same order."""
    if dist.get_world_size() == 1:
        return count
    least = torch.tensor([count], dtype=torch.int64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least.item())


def _checkpointed(policy: nn.Module) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in policy.modules() if isinstance(layer, GradientCheckpointingLayer)]
    return [layer for layer in layers if layer.gradient_checkpointing]


def _computed_again(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


class _Kept:
    """Runs a layer, in the place of torch's checkpointing, and counts what it keeps."""

    def __init__(self, layer: nn.Module, sharded: bool, note: Callable[[int], None]) -> None:
        self._weights: Sequence[nn.Parameter] = list(layer.parameters())
        self._sharded, self._note = sharded, note

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        if not torch.is_grad_enabled():
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
        self._note(sum(sizes.values()))
        return result

    def _weight_of(self, tensor: Tensor) -> nn.Parameter | None:
        return next(
            (one for one in self._weights if one.data_ptr() == tensor.data_ptr() and one.numel() == tensor.numel()),
            None,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _PartOfWeight:
    """A view of a weight, wherever that is when it is needed."""

    weight: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]


def _unpack(saved: "Tensor | _PartOfWeight") -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return saved.weight.data.as_strided(saved.shape, saved.stride, saved.weight.data.storage_offset())
