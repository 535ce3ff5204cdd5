"""Keep the inputs of layers that compute again in the host's memory between their forward and their backward passes.

::

    forward    layer 1, 2, 3, …   each input is copied by a stream of its own while layers compute, and freed two layers later
    backward   layer …, 3, 2, 1   each input comes back while the layer before it in this order computes

A pass does so if the inputs of all layers are a large share of its GPU, which long rows need. What the host has no memory
for stays on the GPU, so nothing fails for it. Copies are exact.
"""

import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from penstock.shared.process import memory_timeline
from penstock.shared.weights.stream_order import Lane, Point

log = logging.getLogger(__name__)

SHARE = 0.05
"""Of a GPU's memory, above which the inputs of all layers go to the host."""
_AHEAD = 2
"""Inputs on the device for copies that may be under way."""
_LEFT = 0.1
"""Share of the host's memory that stays free, for copies of checkpoints and other processes."""
_CHUNK_BYTES = 16 << 20
"""Of pinned memory: of equal size, so that rows of all lengths use the same."""


@dataclasses.dataclass(slots=True, weakref_slot=True, eq=False)
class _Input:
    """One layer's input, in the host's memory, and perhaps on the device."""

    shape: torch.Size
    dtype: torch.dtype
    chunks: list[Tensor]
    copied: Point
    """Behind the newest copy."""
    before: "weakref.ref[_Input] | None"
    """That of the layer before it."""
    tensor: Tensor | None
    version: int
    """Of the tensor, as changes in place raise it."""


class OffloadedInputs:
    """The inputs of ``layers`` layers of one model. On the training thread, and autograd's that works for it."""

    def __init__(self, device: torch.device, layers: int) -> None:
        self._device, self._layers = device, layers
        on_gpu = device.type == "cuda"
        self.least_bytes = SHARE * torch.cuda.get_device_properties(device).total_memory if on_gpu else float("inf")
        """Of all inputs of a pass, above which they are offloaded; never on a CPU."""
        self._lane = Lane(device)
        self._moving: list[_Input] = []
        """Those whose tensor waits for a copy, oldest first."""
        self._newest: weakref.ref[_Input] | None = None
        self._spare: list[Tensor] = []
        """Chunks of pinned memory without an input."""
        self._is_short = False

    def begin(self) -> None:
        """Begin a forward pass; forget what an earlier one left."""
        while self._moving:
            held = self._moving.pop()
            held.copied.follow()
            held.tensor = None
        self._newest = None

    def computed_again(self, function: Callable[..., Any], *args: Any) -> Any:
        """Checkpoint a layer's ``function`` of ``args``, of which the first is its input."""
        pack = functools.partial(self._pack, args[0].data_ptr() if args and isinstance(args[0], Tensor) else 0)
        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            return checkpoint(function, *args, use_reentrant=False)

    def _pack(self, place: int, tensor: Tensor) -> Tensor | _Input:
        is_small = tensor.nbytes * self._layers <= self.least_bytes or not tensor.nbytes
        if is_small or tensor.data_ptr() != place or tensor.device != self._device or not tensor.is_contiguous():
            return tensor
        chunks = self._chunks(tensor.nbytes)
        if not chunks:
            return tensor
        held = _Input(tensor.shape, tensor.dtype, chunks, Point(self._device), self._newest, tensor, tensor._version)
        weakref.finalize(held, self._spare.extend, chunks).atexit = False
        self._copy(held, tensor, to_host=True)
        self._newest = weakref.ref(held)
        while len(self._moving) > _AHEAD:
            self._free(self._moving.pop(0))
        return held

    def _unpack(self, held: Tensor | _Input) -> Tensor:
        if isinstance(held, Tensor):
            return held
        tensor = self._fetch(held)
        before = held.before() if held.before is not None else None
        if before is not None:
            self._fetch(before)
        self._moving.remove(held)
        self._free(held)
        return tensor

    def _fetch(self, held: _Input) -> Tensor:
        """Return the input's tensor, which may still be on its way."""
        if held.tensor is None:
            held.tensor = torch.empty(held.shape, dtype=held.dtype, device=self._device)
            self._copy(held, held.tensor, to_host=False)
            held.version = held.tensor._version
        return held.tensor

    def _copy(self, held: _Input, tensor: Tensor, *, to_host: bool) -> None:
        """Copy on the stream of its own, behind all work on the current one."""
        behind = Point(self._device)
        behind.set()
        self._moving.append(held)
        with self._lane.entered(), torch.no_grad():
            behind.follow()
            for part, chunk in zip(torch.split(_bytes(tensor), _CHUNK_BYTES), held.chunks, strict=True):
                if to_host:
                    chunk[: len(part)].copy_(part, non_blocking=True)
                else:
                    part.copy_(chunk[: len(part)], non_blocking=True)
            held.copied.set()

    def _free(self, held: _Input) -> None:
        """Let the current stream, which may use the tensor's memory next, wait for its copy."""
        held.copied.follow()
        tensor, held.tensor = held.tensor, None
        if tensor is not None and tensor._version != held.version:
            raise RuntimeError("expected a layer to leave its input alone, found one that was changed in place")

    def _chunks(self, nbytes: int) -> list[Tensor]:
        """Return chunks for ``nbytes``; empty where the host is short of memory. They come back with the last reference to
        the input; copies of others are behind its own, on the same stream."""
        count = -(-nbytes // _CHUNK_BYTES)
        if not self._add(count - len(self._spare)):
            return []
        return [self._spare.pop() for _ in range(count)]

    def _add(self, count: int) -> bool:
        """Add spare chunks of pinned memory, if the host has as much for each of its ranks."""
        pinned, reason = self._device.type == "cuda", ""
        try:
            total_bytes, free_bytes = memory_timeline.host_bytes()
            if 0 < count * _CHUNK_BYTES * _ranks_here() > free_bytes - _LEFT * total_bytes:
                reason = "the host has too little free memory"
            else:
                self._spare += [torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]
        except RuntimeError as error:  # of the driver, which cannot pin more
            reason = str(error).splitlines()[0]
        if reason and not self._is_short:
            log.warning("inputs of layers stay on the GPU", extra={"reason": reason})
            self._is_short = True
        return not reason


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
