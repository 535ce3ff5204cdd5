"""Time, memory and speed of a step's phases on this rank."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

import psutil
import torch

from shared.model.flops import peak_tflops


class Phases:
    """Seconds and memory of a step by phase, on the training thread.

    Memory is a GPU's peak in the phase, else what is resident at its end.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._memory: dict[str, float] = {}
        self._device = device or torch.device("cpu")
        self._peak_bytes = 0.0

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the body's wall time to ``phase``, and its memory; phases do not nest."""
        self._note()
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started_s
            self._memory[phase] = max(self._memory.get(phase, 0.0), self._note())

    def _note(self) -> float:
        used_bytes = memory_bytes(self._device)
        self._peak_bytes = max(self._peak_bytes, used_bytes)
        return used_bytes

    def take(self) -> dict[str, float]:
        """Return the seconds so far and start again."""
        seconds, self.seconds = self.seconds, defaultdict(float)
        return dict(seconds)

    def take_memory(self) -> dict[str, float]:
        """Return bytes since the last call: ``memory_bytes``, and ``memory_<phase>_bytes``."""
        self._note()
        figures = {"memory_bytes": self._peak_bytes if self._device.type == "cuda" else memory_bytes(self._device)}
        figures |= {f"memory_{phase}_bytes": nbytes for phase, nbytes in self._memory.items()}
        self._memory, self._peak_bytes = {}, 0.0
        return figures


def memory_bytes(device: torch.device) -> float:
    """Return this rank's peak GPU memory since the last call, or resident memory on CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return float(peak)
    return float(psutil.Process().memory_info().rss)


def utilisation(flops: float, seconds: float, peak_flops: float, device: torch.device) -> dict[str, float]:
    """Return a rank's speed, and its share of the device's peak (``peak_flops`` in TFLOP/s; 0: by device name) if
    known.

    ``flops`` are of forward and backward passes; ``seconds`` include the update.
    """
    reached = flops / max(seconds, 1e-9) / 1e12
    if not peak_flops and device.type == "cuda":
        peak_flops = peak_tflops(torch.cuda.get_device_name(device))
    figures = {"model_tflops_per_s": reached}
    return figures | ({"mfu": reached / peak_flops} if peak_flops else {})
