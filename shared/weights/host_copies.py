"""Move tensors' memory from a device to the host and back, in place.

::

    resident ── offload ──▶ on the host ── reload ──▶ resident, being filled ── follow ──▶ filled
                                           (a thread and stream of its own)

A storage is emptied and filled again, so all views and aliases of it stay valid.
"""

import collections
import threading
from collections.abc import Iterable

import torch

from penstock.shared.errors import SettingsError
from penstock.shared.process import memory_timeline
from penstock.shared.weights.stream_order import Lane, Point

_CHUNK_BYTES = 256 << 20
"""Torch rounds pinned allocations up to powers of two."""
_AHEAD = 2
"""Chunks in the device's queue. It copies in order, so a micro-batch of another stream waits for them."""
_ASIDE_BYTES = 1 << 30
"""Of the host's memory that stays free beside pinned memory, which the kernel cannot move to disk."""
_GIB = 1 << 30


class HostCopies:
    """The storages of one component of a model; on the thread that computes.

    Copies of ``frozen`` storages are kept, so that these are copied once. ``component`` and ``remedy`` are for the
    user, if the host has too little memory.
    """

    def __init__(self, device: torch.device, component: str, remedy: str, *, frozen: bool = False) -> None:
        self._device = device
        self._component, self._remedy = component, remedy
        self._frozen = frozen
        self._lane = Lane(device)
        self._arrived = Point(device)
        self._copied: list[tuple[torch.UntypedStorage, list[torch.Tensor]]] = []
        self._discarded: list[tuple[torch.UntypedStorage, int]] = []
        self._filling: threading.Thread | None = None
        self._failure: Exception | None = None
        self.is_away = False
        """Whether the memory is freed."""

    def offload(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Copy the storages of which there are no copies yet, and free the device's memory.

        More may follow while some are away.

        Raises:
            SettingsError: the host has too little memory. The kernel would end a process instead.
        """
        self._join()
        copied = {storage._cdata for storage, _ in self._copied}
        self._copy([storage for storage in storages if storage._cdata not in copied])
        self._arrived.wait()
        for storage, _ in self._copied:
            storage.resize_(0)
        self.is_away = True

    def _copy(self, storages: list[torch.UntypedStorage]) -> None:
        behind = Point(self._device)
        behind.set()
        needed_bytes = sum(storage.nbytes() for storage in storages)
        new = [(storage, self._host_chunks(storage, needed_bytes)) for storage in storages]
        self._copied += new
        with self._lane.entered():
            behind.follow()
            for storage, chunks in new:
                for part, chunk in zip(torch.split(_flat(storage), _CHUNK_BYTES), chunks, strict=True):
                    chunk.copy_(part, non_blocking=True)
            self._arrived.set()

    def discard(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Free memory whose contents are not needed; it is reloaded as zeros."""
        new = [(storage, storage.nbytes()) for storage in storages]
        self._discarded += new
        for storage, _ in new:
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
        self._filling = threading.Thread(target=self._fill, args=(behind,), name="reload", daemon=True)
        self._filling.start()
        self.is_away = False

    def _fill(self, behind: Point) -> None:
        ahead: collections.deque[Point] = collections.deque()
        try:
            with self._lane.entered():
                behind.follow()
                for storage, chunks in self._copied:
                    for part, chunk in zip(torch.split(_flat(storage), _CHUNK_BYTES), chunks, strict=True):
                        part.copy_(chunk, non_blocking=True)
                        ahead.append(Point(self._device))
                        ahead[-1].set()
                        if len(ahead) == _AHEAD:
                            ahead.popleft().wait()
                self._arrived.set()
        except Exception as error:  # noqa: BLE001 (for the thread that computes)
            self._failure = error

    def _join(self) -> None:
        if self._filling is not None:
            self._filling.join()
            self._filling = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def follow(self, *, everywhere: bool = False) -> None:
        """Make the current stream wait for copies in progress, which are then forgotten unless they are kept.

        ``everywhere``: this thread waits, too, for streams that do not follow the current one, such as DeepSpeed's at stage 3.
        """
        if self.is_away:
            return
        self._join()
        if self._copied:
            self._arrived.follow()
            if everywhere:
                self._arrived.wait()
            self._copied = self._copied if self._frozen else []

    def _host_chunks(self, storage: torch.UntypedStorage, needed_bytes: int) -> list[torch.Tensor]:
        chunks: list[torch.Tensor] = []
        for start in range(0, storage.nbytes(), _CHUNK_BYTES):
            nbytes = min(_CHUNK_BYTES, storage.nbytes() - start)
            on_gpu = storage.device.type == "cuda"
            free_bytes = memory_timeline.host_bytes()[1] - (_ASIDE_BYTES if on_gpu else 0)
            if free_bytes < nbytes and not (on_gpu and _pinned_and_unused() >= nbytes):
                raise SettingsError(
                    f"{self._component} need {needed_bytes / _GIB:.1f} GiB of the host's memory, of which "
                    f"{max(0.0, free_bytes) / _GIB:.1f} GiB are left: {self._remedy}"
                )
            chunks.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu))
        return chunks


def _pinned_and_unused() -> int:
    """Return the bytes that torch keeps pinned for later allocations."""
    stats = torch.cuda.host_memory_stats()
    return int(stats["allocated_bytes.current"] - stats["active_bytes.current"])


def storages_of(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """Return the storages of ``tensors`` on ``device``'s kind, each once, by identity.

    Memory that is mapped from a file cannot be freed and is skipped.
    """
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type)
    return {storage._cdata: storage for storage in storages if storage.nbytes() and storage.resizable()}


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
