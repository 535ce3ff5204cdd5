"""Weights between processes on one GPU: CUDA IPC handles of buckets, without pickle."""

import threading
import weakref
from typing import Any

import torch

from shared.errors import WeightsError
from shared.weights.format.flat import FlatSnapshot
from shared.weights.waits import first_line

Handle = tuple[Any, ...]
_shared: "weakref.WeakKeyDictionary[FlatSnapshot, tuple[Handle, ...]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def share(snapshot: FlatSnapshot) -> tuple[Handle, ...]:
    """Return a handle per bucket (empty if it is not here), made once because torch tracks every handle; raises
    WeightsError if not shareable."""
    with _lock:
        if snapshot not in _shared:
            storages: list[Any] = [bucket.untyped_storage() for bucket in snapshot.buckets]
            here = snapshot.numbers
            try:
                with torch.cuda.device(snapshot.device):
                    _shared[snapshot] = tuple(
                        tuple(storage._share_cuda_()) if number in here else ()
                        for number, storage in enumerate(storages)
                    )
            except RuntimeError as error:
                raise WeightsError(f"CUDA IPC cannot share this memory: {first_line(error)}") from error
        return _shared[snapshot]


def forget(snapshot: FlatSnapshot) -> None:
    """Let torch free the memory of ``snapshot``, which it keeps for pullers that died before they released it."""
    with _lock:
        handles = _shared.pop(snapshot, ())
    for handle in filter(None, handles):
        counter_file, counter_offset = handle[4:6]
        torch.UntypedStorage._release_ipc_counter_cuda(counter_file, counter_offset)


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
