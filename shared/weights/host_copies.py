"""Move tensors' memory from a device to the host and back, in place.

::

    resident ── begin ──▶ being copied ── finish ──▶ on the host ── reload ──▶ resident, being filled ── follow ──▶ filled
                (a stream of its own)     (memory is freed)        (a stream of its own)

A storage is emptied and filled again, so all views and aliases of it stay valid. On a CPU everything happens at once.
"""

from collections.abc import Iterable

import torch

from shared.weights.stream_order import Lane, Point

_CHUNK_BYTES = 256 << 20
"""Torch rounds pinned allocations up to powers of two."""


class HostCopies:
    """The storages of one component of a model; on the thread that computes.

    Copies of ``frozen`` storages are kept, so that these are copied once.
    """

    def __init__(self, device: torch.device, *, frozen: bool = False) -> None:
        self._device = device
        self._frozen = frozen
        self._lane = Lane(device)
        self._arrived = Point(device)
        self._copied: list[tuple[torch.UntypedStorage, list[torch.Tensor]]] = []
        self._discarded: list[tuple[torch.UntypedStorage, int]] = []
        self.is_away = False
        """Whether the memory is freed."""

    def begin(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Start copying; the tensors must not change until :meth:`follow`."""
        if self._copied:
            return
        behind = Point(self._device)
        behind.set()
        self._copied = [(storage, _host_chunks(storage)) for storage in storages]
        with self._lane.entered():
            behind.follow()
            for storage, chunks in self._copied:
                for part, chunk in zip(torch.split(_flat(storage), _CHUNK_BYTES), chunks, strict=True):
                    chunk.copy_(part, non_blocking=True)
            self._arrived.set()

    def finish(self) -> None:
        """Wait for the copies, and free the device's memory."""
        self._arrived.wait()
        for storage, _ in self._copied:
            storage.resize_(0)
        self.is_away = True

    def discard(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Free memory whose contents are not needed; it is reloaded as zeros."""
        self._discarded = [(storage, storage.nbytes()) for storage in storages]
        for storage, _ in self._discarded:
            storage.resize_(0)
        self.is_away = True

    def reload(self) -> None:
        """Allocate the memory and start to fill it; use it after :meth:`follow`."""
        if not self.is_away:
            return
        for storage, chunks in self._copied:
            storage.resize_(sum(chunk.nbytes for chunk in chunks))
        for storage, nbytes in self._discarded:
            storage.resize_(nbytes)
            _flat(storage).zero_()
        self._discarded = []
        behind = Point(self._device)
        behind.set()
        with self._lane.entered():
            behind.follow()
            for storage, chunks in self._copied:
                for part, chunk in zip(torch.split(_flat(storage), _CHUNK_BYTES), chunks, strict=True):
                    part.copy_(chunk, non_blocking=True)
            self._arrived.set()
        self.is_away = False

    def follow(self) -> None:
        """Make the current stream wait for copies in progress, which are then forgotten unless they are kept."""
        if self._copied and not self.is_away:
            self._arrived.follow()
            self._copied = self._copied if self._frozen else []


def storages_of(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """Return the storages of ``tensors`` on ``device``'s kind, each once, by identity.

    Memory that is mapped from a file cannot be freed and is skipped.
    """
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type)
    return {storage._cdata: storage for storage in storages if storage.nbytes() and storage.resizable()}


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_chunks(storage: torch.UntypedStorage) -> list[torch.Tensor]:
    on_gpu = storage.device.type == "cuda"
    sizes = [min(_CHUNK_BYTES, storage.nbytes() - start) for start in range(0, storage.nbytes(), _CHUNK_BYTES)]
    return [torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) for size in sizes]
