"""Choose how many engines share a GPU, and their memory. Arithmetic only."""

import dataclasses
from typing import Any

from penstock.shared.errors import SettingsError

MAX_ENGINES = 3
"""In time slices, a fourth engine decoded 6 % less on an H200 (0.5B, 512 sequences)."""
_LARGE_PARAMETERS = 6_500_000_000
"""From 7B on, one engine keeps a GPU busy."""
_BUSY = 0.9
"""Target share of busy time."""
_CORES_PER_ENGINE = 2
_ENGINE_BYTES = 4 << 30
"""CUDA context, graphs and activations of a small model."""
_WEIGHT_COPIES = 1.25
"""Weights with padding, and activations that grow with the model."""
_LOGIT_COPIES = 6
"""Float32 copies of a step's logits."""
_SHADOW = 1.05
_LEAST_KV_CACHE_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class EngineCount:
    engines: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """Bytes of an engine's weights and of its steps' float32 logits."""

    policy_parameters: int
    policy_bytes: int
    logits_bytes: int
    shadow: bool = True
    """Whether each engine keeps a second copy of the weights."""


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    total_bytes: int
    free_bytes: int

    def arguments(self, engines: int, utilization: float, demand: Demand) -> dict[str, Any]:
        """Return memory arguments for each of ``engines`` that start together; raises SettingsError if too large.

        In total at most ``utilization`` of the GPU, leaving each its shadow of the weights.
        """
        shadows_bytes = _SHADOW * engines * demand.policy_bytes if demand.shadow else 0.0
        share_bytes = min(utilization * self.total_bytes, self.free_bytes - shadows_bytes) / engines
        needed_bytes = _WEIGHT_COPIES * demand.policy_bytes + _ENGINE_BYTES + _LOGIT_COPIES * demand.logits_bytes
        kv_cache_bytes = int(share_bytes - needed_bytes)
        if kv_cache_bytes < _LEAST_KV_CACHE_BYTES:
            raise SettingsError(
                f"expected GPU memory for {engines} engines of {(needed_bytes + _LEAST_KV_CACHE_BYTES) / 2**30:.1f} GiB each, "
                f"found {share_bytes / 2**30:.1f} GiB for each: lower rollout.engines_per_gpu or raise "
                "rollout.vllm.gpu_memory_utilization"
            )
        # At start-up, vLLM compares it with free memory, which other engines already use.
        startup_share = 0.5 * share_bytes / self.total_bytes
        return {"kv_cache_memory_bytes": kv_cache_bytes, "gpu_memory_utilization": startup_share}


def upper_limit(memory: Memory, cores: int, utilization: float, demand: Demand) -> EngineCount:
    """Return the maximum number of engines for parameters, ``cores`` and memory."""
    if demand.policy_parameters >= _LARGE_PARAMETERS:
        return EngineCount(1, f"a model of {demand.policy_parameters / 1e9:.1f}B parameters keeps the GPU busy")
    by_cores = max(1, cores // _CORES_PER_ENGINE)
    for engines in range(min(MAX_ENGINES, by_cores), 1, -1):
        try:
            memory.arguments(engines, utilization, demand)
        except SettingsError:
            continue
        return EngineCount(engines, f"at most {engines} by {cores} CPU cores and {memory.free_bytes / 2**30:.0f} GiB")
    return EngineCount(1, f"{cores} CPU cores and {memory.free_bytes / 2**30:.0f} GiB allow no second engine")


def by_load(busy: float, limit: EngineCount) -> EngineCount:
    """Return the number of engines, if one keeps the GPU busy for the share ``busy``."""
    engines = max(1, min(limit.engines, round(_BUSY / max(busy, 0.01))))
    return EngineCount(engines, f"one engine kept the GPU busy for {busy:.0%} of the time; {limit.reason}")
