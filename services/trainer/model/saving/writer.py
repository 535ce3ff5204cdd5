"""Write beside training what DeepSpeed saves.

::

    DeepSpeed's save ──▶ a copy in the host's memory (training continues) ──▶ write: files, synced, with their digests
                    └──▶ the host has no memory for it: written at once

DeepSpeed does not hear of storage errors: raising between its barriers would hang other ranks.
"""

import contextlib
import copy
import dataclasses
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.services.trainer.checkpoint.local_store import digest
from penstock.services.trainer.checkpoint.manifests import CheckpointFile
from penstock.services.trainer.model.memory.storages import Storages, tensors_in
from penstock.services.trainer.model.saving.ranges import Range, with_ranges
from penstock.services.trainer.rank_group import meet_at_storage
from penstock.shared.files import durable

log = logging.getLogger(__name__)

_PINNED_BYTES = 1 << 20
"""From which on a copy is pinned: smaller ones would share pages, each of which is registered once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    files: dict[Path, CheckpointFile]
    error: str = ""
    """Of storage."""


class Writer:
    """Takes the place of an engine's checkpoint engine; for one checkpoint at a time."""

    def __init__(self, checkpoint_engine: Any, device: torch.device) -> None:
        self._write, self._commit = checkpoint_engine.save, checkpoint_engine.commit
        checkpoint_engine.save, checkpoint_engine.commit = self.save, self.commit
        self._host = _HostMemory(device)
        self.begin()

    @property
    def kept_bytes(self) -> int:
        """Pinned memory of the host that is kept for the next checkpoint."""
        return self._host.kept_bytes

    def begin(self, error: str = "", *, copies: bool = True, ranges: Sequence[Range] | None = None) -> None:
        """Forget the checkpoint before; with an ``error`` this one is not written. Without ``copies`` it is written at once.
        ``ranges`` are those that the optimizer's file holds.
        """
        self._error, self._copies, self._ranges = error, copies, ranges
        self._files: dict[Path, CheckpointFile] = {}
        self._copied: list[tuple[Any, Path]] = []

    def commit(self, info: Any) -> bool:
        """Let ranks meet once all have copied or written, as NCCL is less patient."""
        meet_at_storage()
        return bool(self._commit(info))

    def save(self, state_dict: Any, path: str) -> None:
        """Copy to the host's memory, or write at once."""
        if self._error:
            return
        state_dict = with_ranges(state_dict, path, self._ranges)
        if self._copies:
            try:
                self._copied.append((self._host.copy(state_dict), Path(path)))
                return
            except (RuntimeError, MemoryError) as error:
                log.warning("training waits for its checkpoint", extra={"reason": f"no memory for a copy: {error}"})
        self._save(state_dict, Path(path))

    def write(self) -> Written:
        """Write what was copied, and free the copy; for any thread, while training continues."""
        for state_dict, path in self._copied:
            if not self._error:
                self._save(state_dict, path)
        self._copied = []
        self._host.release()
        return Written(self._files, self._error)

    def _save(self, state_dict: Any, path: Path) -> None:
        """Write a file, unless the disk has no room for it, which other processes of the run may need; read it for its digest while it
        is in the page cache.
        """
        nbytes, free_bytes = Storages().add(tensors_in(state_dict)), durable.usable_bytes(path.parent)
        if nbytes > free_bytes:
            self._error = f"{path} needs {nbytes:,} bytes, and {free_bytes:,} are free for it"
            return
        try:
            with _without_crc32():
                self._write(state_dict, str(path))
            self._files[path] = digest(path)
            durable.flush(path)
        except (OSError, RuntimeError) as error:
            self._error = f"{path}: {error}".splitlines()[0]


class _HostMemory:
    """Copies of tensors in the host's memory; that of a GPU's is pinned, and kept for the next ones."""

    def __init__(self, device: torch.device) -> None:
        self._pins = device.type == "cuda"
        self._kept: dict[int, list[Tensor]] = defaultdict(list)
        """By bytes."""
        self._used: list[Tensor] = []

    @property
    def kept_bytes(self) -> int:
        return sum(nbytes * len(buffers) for nbytes, buffers in self._kept.items())

    def copy(self, state: Any) -> Any:
        """Return ``state`` with copies of its tensors, which share storages as before."""
        storages: dict[int, torch.UntypedStorage] = {}
        copies: dict[int, Any] = {}
        for tensor in tensors_in(state):
            key = tensor.untyped_storage()._cdata
            if key not in storages:
                storages[key] = self._copied(tensor.untyped_storage())
            copied = torch.empty(0, dtype=tensor.dtype)
            copied.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())
            copies[id(tensor)] = copied
        if self._pins:
            torch.cuda.current_stream().synchronize()
        return copy.deepcopy(state, copies)

    def release(self) -> None:
        """Let the memory be used by the next copies, if it is pinned, or free it."""
        for buffer in self._used:
            self._kept[buffer.nbytes].append(buffer)
        self._used = []

    def _copied(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if not self._pins or source.nbytes < _PINNED_BYTES:
            return torch.empty(source.nbytes, dtype=torch.uint8).copy_(source).untyped_storage()
        kept = self._kept[source.nbytes]
        buffer = kept.pop() if kept else _pinned(source.nbytes)
        self._used.append(buffer)
        return buffer.copy_(source, non_blocking=True).untyped_storage()


def _pinned(nbytes: int) -> Tensor:
    """Return pinned memory of that many bytes: torch's own allocator rounds up to powers of two."""
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), nbytes, 0))
    return buffer


@contextlib.contextmanager
def _without_crc32() -> Iterator[None]:
    """Write checkpoints without the archive's own checksums, which take three quarters of the time; the manifest has
    digests.
    """
    was = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(was)
