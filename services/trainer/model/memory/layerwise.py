"""Compute with a model whose weights are in the host's memory: each decoder layer comes to the device for its call.

::

    weights in layers   on the device from the layer's call to its end; what its backward pass needs is copied again
    all others          on the device within the block: embeddings, norms, output layer, buffers

So a model starts that no device holds whole: before ZeRO stage 3 divides it, it is tested, and looked at, layer by layer.
One that takes at most half of a GPU's free memory is there whole within the block, which copies each weight once.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.services.trainer.model import experts
from penstock.services.trainer.model.memory.recomputation import checkpointable
from penstock.shared.settings import Settings

SMALL = 1 << 16
"""Numbers in a weight that stays on the device."""


def looked_at(policy: nn.Module, settings: Settings, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Compute on ``device`` with a policy or critic that is to be trained with ``settings``, and is not divided yet."""
    is_divided = any(hasattr(weight, "ds_id") for weight in policy.parameters())
    if settings.trainer.zero_stage < 3 or is_divided:
        return contextlib.nullcontext()
    return by_layer(policy, device)


def divide(policy: nn.Module, config: Mapping[str, Any], device: torch.device) -> None:
    """Keep this rank's part of each weight, with one weight on ``device`` at a time; values are rank 0's. Collective.

    ``config``: DeepSpeed's, of stage 3.
    """
    import deepspeed

    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    for buffer in policy.buffers():
        buffer.data = buffer.data.to(device)
    for weight in policy.parameters():
        if dtype is not torch.float32 and not hasattr(weight, "ds_id"):
            weight.data = weight.data.to(dtype)
    deepspeed.zero.Init(module=policy, dtype=dtype, config_dict_or_path=config)


@contextlib.contextmanager
def by_layer(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Compute with ``model`` on ``device`` within the block; its weights come back to where they were.

    Between calls a layer's weight is NaN of its shape, without memory (:func:`cast` changes its number type).
    """
    # one in another may be computed again by itself, as divided experts are
    layers = [] if _fits(model, device) else [*checkpointable(model), *experts.layers_of(model)]
    streamed = _Streamed(device, {weight: weight.data for layer in layers for weight in _large(layer)})
    others = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor not in streamed.host]
    before = [tensor.data for tensor in others]
    hooks = [hook for layer in layers for hook in streamed.follow(layer)]
    try:
        for tensor in others:
            tensor.data = tensor.data.to(device)
        with torch.autograd.graph.saved_tensors_hooks(streamed.pack, streamed.unpack):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for tensor, data in (*zip(others, before, strict=True), *streamed.host.items()):
            tensor.data = data


def _fits(model: nn.Module, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return 2 * sum(weight.nbytes for weight in model.parameters()) <= torch.cuda.mem_get_info(device)[0]


def is_away(tensor: Tensor) -> bool:
    """Whether it stands for a weight in the host's memory."""
    return tensor.numel() > SMALL and not any(tensor.stride())


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor`` in ``dtype``; one that is away stays so, and comes in ``dtype``."""
    return _absent(tensor.shape, dtype, tensor.device) if is_away(tensor) else tensor.to(dtype)


def _absent(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((1,), torch.nan, dtype=dtype, device=device).expand(shape)


def _large(layer: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in layer.parameters() if weight.numel() > SMALL]


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A view of a layer's weight that a backward pass needs."""

    weight: Tensor
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Streamed:
    """``host``: the weights of layers, in the host's memory."""

    def __init__(self, device: torch.device, host: dict[Tensor, Tensor]) -> None:
        self.host = host
        self._device = device
        self._present = dict[int, Tensor]()
        """The weight in each storage on the device."""
        self._calls = Counter[Tensor]()
        """Layers that are being called and have the weight."""
        for weight in host:
            weight.data = _absent(weight.shape, weight.dtype, device)

    def follow(self, layer: nn.Module) -> list[Any]:
        """Bring the layer's weights for each of its calls; return the hooks."""
        weights = _large(layer)

        def bring(*_: object) -> None:
            for weight in weights:
                if not self._calls[weight]:
                    weight.data = self._copied(weight, weight.dtype)
                    self._present[weight.untyped_storage().data_ptr()] = weight
                self._calls[weight] += 1

        def leave(*_: object) -> None:
            for weight in weights:
                self._calls[weight] -= 1
                if self._calls[weight]:
                    continue
                del self._present[weight.untyped_storage().data_ptr()]
                weight.data = _absent(weight.shape, weight.dtype, self._device)

        return [
            layer.register_forward_pre_hook(bring),
            layer.register_forward_hook(leave, always_call=True),
        ]

    def pack(self, tensor: Tensor) -> "Tensor | _Part":
        weight = self._present.get(tensor.untyped_storage().data_ptr())
        if weight is None:
            return tensor
        return _Part(weight, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: "Tensor | _Part") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return self._copied(saved.weight, saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)

    def _copied(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return self.host[weight].to(self._device, dtype, copy=True, memory_format=torch.contiguous_format)
