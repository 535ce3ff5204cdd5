"""This process's GPUs by NVML, without a CUDA context."""

import asyncio
import os
import statistics
from typing import Any

from penstock.services.rollout.engines.vllm.several.plan import Memory
from penstock.shared.errors import SettingsError
from penstock.shared.preflight.node import mps_answers
from penstock.shared.process.gpus import visible_names

_SAMPLES, _INTERVAL_S = 20, 0.1


class NvmlGpu:
    """The GPU at ``place`` in ``CUDA_VISIBLE_DEVICES``; raises SettingsError if NVML does not know it."""

    def __init__(self, place: int = 0) -> None:
        from vllm.third_party import pynvml

        self._nvml: Any = pynvml
        name = _visible(place)
        try:
            pynvml.nvmlInit()
            by_uuid = name.startswith(("GPU-", "MIG-"))
            find = pynvml.nvmlDeviceGetHandleByUUID if by_uuid else pynvml.nvmlDeviceGetHandleByIndex
            self._handle = find(name if by_uuid else int(name))
            self.memory = self._memory()
        except (pynvml.NVMLError, ValueError) as error:
            raise SettingsError(
                f"NVML does not report the GPU {name}: {error}: set rollout.engines_per_gpu = 1"
            ) from error

    def _memory(self) -> Memory:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return Memory(int(memory.total), int(memory.free))

    async def busy_share(self) -> float | None:
        """Return the GPU's busy share of the next two seconds, or None if not reported."""
        samples: list[float] = []
        for _ in range(_SAMPLES):
            await asyncio.sleep(_INTERVAL_S)
            try:
                samples.append(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100)
            except self._nvml.NVMLError:
                return None
        return statistics.fmean(samples)


def _visible(place: int) -> str:
    names = visible_names(os.environ) or []
    return names[place] if place < len(names) else str(place)


def sharing() -> str:
    """Return how CUDA shares a GPU."""
    return "CUDA MPS" if mps_answers() else "time slices"
