"""Offload a module when idle, and detect out-of-memory errors. Imports torch."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from services.reward.models.batcher import NoRoom
from shared.errors import SettingsError, is_out_of_memory
from shared.process import memory_timeline
from shared.process.memory_timeline import Held

Done = TypeVar("Done")


class Placed:
    """``module``, frozen, on ``device``, with CPU ``threads`` (0: torch's default)."""

    def __init__(self, module: Any, device: torch.device, threads: int = 0) -> None:
        self.module = module.eval().requires_grad_(False)
        self.device = device
        self._threads = threads
        self._place = memory_timeline.place_of(device)
        self.restore()

    def offload(self) -> None:
        """Move the weights to host memory."""
        self.module.to("cpu")
        self._empty_cache()

    def restore(self) -> None:
        """Move them back. Raises NoRoom."""
        self.guarded(lambda: self.module.to(self.device))

    def held(self, component: str) -> Held:
        """Return what the module holds on its device, as ``component``."""
        here = [part for part in self.module.parameters() if part.device.type == self.device.type]
        total_bytes = memory_timeline.used_bytes(self.device)
        return Held(self._place, {component: float(sum(part.nbytes for part in here))}, total_bytes)

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
