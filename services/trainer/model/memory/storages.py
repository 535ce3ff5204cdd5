"""Tensors in nested containers, and the bytes of their storages."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor


class Storages:
    """Adds up storages on one kind of device (None: on all), each once."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._kind = None if device is None else device.type
        self._counted: set[int] = set()

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of the storages that were not counted yet."""
        nbytes = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if self._kind not in (None, tensor.device.type) or storage.data_ptr() in self._counted:
                continue
            self._counted.add(storage.data_ptr())
            nbytes += storage.nbytes()
        return nbytes


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
