"""Time, memory and speed of a step's phases on this rank."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import torch

from penstock.shared.bus.messages import MemorySample
from penstock.shared.model.flops import peak_tflops
from penstock.shared.process import memory_timeline

_WORDS = {"forward_backward": "forward and backward"}
_REST = {
    "optimizer": "gradients in float32",
    **dict.fromkeys(
        ("forward_backward", "proximal", "reference", "critic", "probe", "evaluation"), memory_timeline.ACTIVATIONS
    ),
}
"""What a GPU's peak in a phase holds beside the components."""


class Phases:
    """Seconds and memory of a step by phase, on the training thread.

    Memory is a GPU's peak in the phase, else what is resident at its end. ``components``: bytes of this rank's tensors.
    """

    def __init__(
        self, device: torch.device | None = None, components: Callable[[], Mapping[str, float]] | None = None
    ) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._memory: dict[str, float] = {}
        self._device = device or torch.device("cpu")
        self._place = memory_timeline.place_of(self._device)
        self._peak_bytes = 0.0
        self._components = components
        self._held: Mapping[str, float] = {}
        self._samples: dict[str, MemorySample] = {}

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the body's wall time to ``phase``, and its memory; phases do not nest."""
        self._note()
        started_s = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started_s
            self.seconds[phase] += seconds
            nbytes = self._note()
            if phase not in self._samples or nbytes > self._memory.get(phase, 0.0):
                self._sample(phase, seconds, nbytes)
            self._memory[phase] = max(self._memory.get(phase, 0.0), nbytes)

    def _note(self) -> float:
        used_bytes = memory_bytes(self._device)
        self._peak_bytes = max(self._peak_bytes, used_bytes)
        return used_bytes

    def _sample(self, phase: str, seconds: float, nbytes: float) -> None:
        """Note what the phase held: the larger of each component at its begin and end."""
        if self._components is None:
            return
        before, self._held = self._held, self._components()
        names = dict.fromkeys([*before, *self._held])
        held = {name: max(before.get(name, 0.0), self._held.get(name, 0.0)) for name in names}
        rest = _REST.get(phase, memory_timeline.OTHER) if self._device.type == "cuda" else memory_timeline.OTHER
        words = _WORDS.get(phase, phase)
        self._samples[phase] = memory_timeline.sample(self._place, words, seconds, held, nbytes, rest)

    def take(self) -> dict[str, float]:
        """Return the seconds so far and start again."""
        seconds, self.seconds = self.seconds, defaultdict(float)
        return dict(seconds)

    def take_memory(self) -> dict[str, float]:
        """Return bytes since the last call: ``memory_bytes``, and ``memory_<phase>_bytes``."""
        self._note()
        whole = self._peak_bytes if self._device.type == "cuda" else memory_bytes(self._device)
        figures = {"memory_bytes": whole}
        figures |= {f"memory_{phase}_bytes": nbytes for phase, nbytes in self._memory.items()}
        self._memory, self._peak_bytes = {}, 0.0
        return figures

    def take_samples(self) -> tuple[MemorySample, ...]:
        """Return the samples of the memory timeline since the last call."""
        samples, self._samples = self._samples, {}
        return tuple(samples.values())


def memory_bytes(device: torch.device) -> float:
    """Return this rank's peak GPU memory since the last call, or resident memory on CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return float(peak)
    return memory_timeline.resident_bytes()


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
