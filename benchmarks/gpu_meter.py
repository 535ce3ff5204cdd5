"""GPUs of a benchmark: those in CUDA_VISIBLE_DEVICES, and how busy they are, by NVML; empty without NVML."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.shared.process.gpus import VISIBLE, visible_names

_INTERVAL_S = 0.05


def only(*places: int) -> dict[str, str]:
    """Return the environment in which a process sees these alone of the GPUs that this process sees."""
    names = visible_names(os.environ)
    return {VISIBLE: ",".join(str(place) if names is None else names[place] for place in places)}


class GpuMeter:
    """Samples: (Unix seconds, share of time with a kernel running, by GPU)."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, tuple[float, ...]]] = []
        self._stopped = threading.Event()

    def figures(self, begin_s: float, end_s: float) -> dict[str, dict[str, float]]:
        """Return each GPU's ``busy`` (mean) and ``idle`` (share of zeros) between two times."""
        rows = [shares for at_s, shares in self.samples if begin_s <= at_s <= end_s]
        return {
            str(gpu): {"busy": round(sum(shares) / len(shares), 3), "idle": round(shares.count(0.0) / len(shares), 3)}
            for gpu, shares in enumerate(zip(*rows, strict=True))
        }

    def run(self) -> None:
        """Sample until stopped, if NVML exists."""
        nvml = _nvml()
        if nvml is None:
            return
        names = visible_names(os.environ)
        handles = [
            _handle(nvml, name) for name in (map(str, range(nvml.nvmlDeviceGetCount())) if names is None else names)
        ]
        while not self._stopped.wait(_INTERVAL_S):
            shares = tuple(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles)
            self.samples.append((time.time(), shares))

    def stop(self) -> None:
        """End :meth:`run`."""
        self._stopped.set()


def _handle(nvml: Any, name: str) -> Any:
    """Return the GPU of a number or UUID."""
    if name.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(name)
    return nvml.nvmlDeviceGetHandleByIndex(int(name))


def _nvml() -> Any:
    try:
        from vllm.third_party import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


@contextmanager
def gpu_meter() -> Iterator[GpuMeter]:
    """Yield a meter that samples in a thread."""
    meter = GpuMeter()
    thread = threading.Thread(target=meter.run, name="gpu meter", daemon=True)
    thread.start()
    try:
        yield meter
    finally:
        meter.stop()
        thread.join()
