"""Offload a module when idle, and detect out-of-memory errors. Imports torch."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from penstock.services.reward.models.batcher import NoRoom
from penstock.shared.errors import SettingsError, is_out_of_memory
from penstock.shared.process import memory_timeline
from penstock.shared.process.memory_timeline import Held
from penstock.shared.weights.host_copies import HostCopies, storages_of

Done = TypeVar("Done")


class Placed:
    """``module``, frozen, on ``device``, with CPU ``threads`` (0: torch's default)."""

    def __init__(self, module: Any, device: torch.device, threads: int = 0) -> None:
        self.module = module.eval().requires_grad_(False)
        self.device = device
        self._threads = threads
        self._place = memory_timeline.place_of(device)
        remedy = "give them a GPU of their own with reward.gpus"
        self._copies = HostCopies(device, "the weights of a reward model", remedy, frozen=True)
        self.guarded(lambda: self.module.to(device))

    def offload(self) -> None:
        """Free the device; the weights are copied to host memory the first time."""
        self._make_freeable()
        self._copies.offload(storages_of(self.module.parameters(), self.device).values())
        self._empty_cache()

    def restore(self) -> None:
        """Move the weights back. Raises NoRoom."""
        try:
            self.guarded(self._reload)
        except NoRoom:
            self._copies.offload(())  # what is back already; the copies are kept
            self._empty_cache()
            raise

    def held(self, component: str) -> Held:
        """Return what the module holds on its device, as ``component``."""
        here = [part.untyped_storage() for part in self.module.parameters() if part.device.type == self.device.type]
        nbytes = sum({storage.data_ptr(): storage.nbytes() for storage in here}.values())
        total_bytes, peak_bytes = memory_timeline.used_bytes(self.device), memory_timeline.peak_bytes(self.device)
        return Held(self._place, {component: float(nbytes)}, total_bytes, peak_bytes=peak_bytes)

    def _reload(self) -> None:
        self._copies.reload()
        self._copies.follow()

    def _make_freeable(self) -> None:
        """Copy weights that are mapped from a file, as on a CPU."""
        for parameter in self.module.parameters():
            if not parameter.untyped_storage().resizable():
                parameter.data = parameter.data.clone()

    def guarded(self, work: Callable[[], Done]) -> Done:
        """Run ``work`` without gradients. Raises NoRoom."""
        if self._threads:
            torch.set_num_threads(self._threads)  # per calling thread
        try:
            with torch.no_grad():
                return work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
        # Only here is the error gone, with the frames that held tensors.
        self._empty_cache()
        raise NoRoom(reason)

    def _empty_cache(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def pick_device(device: str, setting: str) -> torch.device:
    """Return the device of a setting. Raises SettingsError if this machine lacks it."""
    try:
        torch_device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        torch.empty(1, device=torch_device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SettingsError(
            f"expected auto, cpu or a device of this machine, but {device!r} cannot be used ({first_line(error)}): "
            f"change {setting}"
        ) from error
    return torch_device


def pick_dtype(device: torch.device, on_gpu: str = "bfloat16") -> torch.dtype:
    """Return ``on_gpu`` on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" and on_gpu == "bfloat16" else torch.float32


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
