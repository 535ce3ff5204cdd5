"""Weights between processes on one GPU: CUDA IPC handles of buckets, without pickle."""

from typing import Any

import torch
from torch import Tensor

from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.waits import first_line

Handle = tuple[Any, ...]


class SharedBuckets:
    """The handles of a snapshot's buckets (empty if one is not here) for one puller, which maps each once.

    torch keeps memory that it shares until the count of its pullers is exactly zero, which a killed puller, or one that
    maps it again, prevents. So aliases are shared, and the memory remains the snapshot's alone. Raises WeightsError if
    it cannot be shared.
    """

    def __init__(self, snapshot: FlatSnapshot) -> None:
        self._aliases = {number: _alias(snapshot.buckets[number]) for number in snapshot.numbers}
        try:
            with torch.cuda.device(snapshot.device):
                self.handles = tuple(map(self._handle, range(len(snapshot.buckets))))
        except RuntimeError as error:
            raise WeightsError(f"CUDA IPC cannot share this memory: {first_line(error)}") from error

    def _handle(self, number: int) -> Handle:
        alias: Any = self._aliases.get(number)
        return () if alias is None else tuple(alias.untyped_storage()._share_cuda_())


def _alias(bucket: Tensor) -> Tensor:
    """Return a tensor of the same memory that does not own it."""

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012 (the protocol's attribute)
            "shape": (bucket.numel(),), "typestr": "|u1", "data": (bucket.data_ptr(), False), "strides": None, "version": 2,
        }  # fmt: skip

    return torch.as_tensor(Memory(), device=bucket.device)


def map_buckets(handles: tuple[Handle, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the buckets (uint8) behind ``handles`` on ``device``, the same GPU; raises WeightsError if gone."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    try:
        with torch.cuda.device(index):
            return tuple(_map(handle, index) if handle else torch.empty(0, dtype=torch.uint8) for handle in handles)
    except (RuntimeError, TypeError) as error:
        raise WeightsError(f"could not map the source's memory: {first_line(error)}") from error


def _map(handle: Handle, index: int) -> torch.Tensor:
    # the first element is the source's GPU index, which may differ
    storage = torch.UntypedStorage._new_shared_cuda(index, *handle[1:])
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)
