"""Free a vLLM worker's memory for training, rung by rung, and take it back; on a GPU, with vLLM's sleep mode.

::

    rung 0   decoding is paused
    rung 1   + the KV cache's memory is returned to the driver
    rung 2   + the weights', whose contents the next swap brings back

Sleep mode keeps the addresses, so CUDA graphs and copy plans stay valid.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from penstock.shared.errors import SettingsError, WeightsError
from penstock.shared.process.memory_timeline import host_bytes

_GIB = float(1 << 30)
KV_CACHE = "kv_cache"
"""vLLM's tag of its allocations."""
FREED = {0: (), 1: ("key-value cache",), 2: ("key-value cache", "weights", "shadow")}
"""Components of the memory timeline that are away at each rung, the last one's also above it; torch counts them as
allocated all the time."""


class Ladder:
    """What one worker holds; in the thread that steps the model."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._rung = 0
        self._freed_bytes = 0

    def free(self, rung: int, *, keep_weights: bool) -> None:
        """Free memory down to ``rung``; decoding is paused, and no request uses the KV cache from rung 1 on.

        Args:
            keep_weights: at rung 2, copy the weights to the host instead of discarding them.

        Raises:
            WeightsError: this device has no sleep mode.
        """
        if rung and self._worker.device.type != "cuda":
            raise WeightsError(f"expected rung 0 for vLLM on a CPU, found {rung}: set placement.rung = 0")
        before_bytes = free_bytes(self._worker.device)
        if rung >= 2:
            self._worker.sleep(level=1 if keep_weights else 2)
        elif rung == 1:
            self._discard_kv_cache()
        self._rung = rung
        self._freed_bytes = free_bytes(self._worker.device) - before_bytes

    def take_back(self) -> None:
        """Allocate what was freed.

        Raises:
            SettingsError: the device has too little memory left; the engine cannot be used any more.
        """
        rung, self._rung = self._rung, 0
        if not rung:
            return
        there_bytes = free_bytes(self._worker.device)
        try:
            self._worker.wake_up(None if rung >= 2 else [KV_CACHE])
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            raise SettingsError(
                f"expected the {self._freed_bytes / _GIB:.1f} GiB that this engine freed to be there again for generation, found "
                f'{there_bytes / _GIB:.1f} GiB free: raise placement.rung ("auto" takes one that fits), or lower '
                "rollout.vllm.gpu_memory_utilization"
            ) from error

    def measure(self) -> dict[str, int]:
        """Return the bytes of each component when resident, and the device's."""
        device = self._worker.device
        model = self._worker.model_runner.get_model()
        caches = storages(tensors(getattr(self._worker.model_runner, "kv_caches", ())))
        return {
            "weights": sum(parameter.nbytes for parameter in model.parameters()),
            "kv_cache": sum(caches.values()),
            "capacity": _capacity(device),
        }

    def _discard_kv_cache(self) -> None:
        if hasattr(self._worker, "discard"):
            self._worker.discard((KV_CACHE,))
        else:  # before vLLM 0.32
            from vllm.device_allocator import cumem

            torch.cuda.synchronize(self._worker.device)
            for allocation in cumem.CuMemAllocator.get_instance().pointer_to_data.values():
                if allocation.tag == KV_CACHE:
                    cumem.unmap_and_release(allocation.handle)
        torch.cuda.empty_cache()


def storages(of: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage, by address: the caches of several layers may be views of one."""
    each = [tensor.untyped_storage() for tensor in of]
    return {storage.data_ptr(): storage.nbytes() for storage in each}


def tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that no process uses; on a CPU 0, as nothing is freed there."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def _capacity(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_bytes()[0])
