"""Choose and start a replica's engines (``rollout.engines_per_gpu``)."""

import asyncio
import contextlib
import dataclasses
import os
import threading
from collections.abc import AsyncIterator
from typing import Any, Literal

import numpy as np
import torch

from penstock.services.rollout.engines.checkpoint_form import outline
from penstock.services.rollout.engines.engine import GenerationRequest
from penstock.services.rollout.engines.vllm.arguments import serving as explained
from penstock.services.rollout.engines.vllm.engine import VllmEngine
from penstock.services.rollout.engines.vllm.multihost.hosts import Hosts
from penstock.services.rollout.engines.vllm.several import plan
from penstock.services.rollout.engines.vllm.several.engine_set import EngineSet
from penstock.services.rollout.engines.vllm.several.gpu import NvmlGpu, sharing
from penstock.services.rollout.engines.vllm.several.plan import Demand, EngineCount
from penstock.services.rollout.engines.vllm.start import open_vllm
from penstock.shared.bus.messages import Sampling


class SharedStatistics:
    """vLLM's Prometheus logger for all ``engines``; each AsyncLLM would replace it."""

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._config: Any = None
        self._logger: Any = None
        self._lock = threading.Lock()

    def grow(self, engines: int) -> None:
        self._engines, self._logger = engines, self._opened(self._config, engines)

    def factory(self, engine: int) -> type:
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        shared = self

        class EngineStatistics(PrometheusStatLogger):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
                shared._open(vllm_config)

            def record(self, *statistics: Any, **named: Any) -> None:
                shared._logger.record(*statistics, **{**named, "engine_idx": engine})

            def log_engine_initialized(self) -> None:
                pass

        return EngineStatistics

    def _open(self, config: Any) -> None:
        with self._lock:
            if self._logger is None:
                self._config, self._logger = config, self._opened(config, self._engines)

    @staticmethod
    def _opened(config: Any, engines: int) -> Any:
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        logger = PrometheusStatLogger(config, list(range(engines)))
        logger.log_engine_initialized()
        return logger


_PROMPT_TOKENS, _NEW_TOKENS, _GROUP = 16, 1024, 8
_WARM_UP_S = 2.0


async def open_engines(
    count: int | Literal["auto"],
    arguments: dict[str, Any],
    hosts: Hosts | None = None,
    *,
    beside_trainer: bool = False,
    **serving: Any,
) -> tuple[VllmEngine | EngineSet, EngineCount]:
    """Return ``count`` engines on one GPU as one, and the reason for their number; may raise SettingsError.

    Args:
        arguments: for one engine with the whole GPU; sequences and memory are split.
        beside_trainer: the trainer uses the GPU, too, whose memory vLLM cannot measure then: it is computed, as that of
            several engines.
    """
    limit = await asyncio.to_thread(_upper_limit, count, arguments, hosts, serving)
    alone = not beside_trainer or hosts is not None or arguments["tensor_parallel_size"] > 1
    if limit.engines == 1 and alone:
        return await open_vllm(arguments, hosts, **serving), limit
    starter = await asyncio.to_thread(_Starter, arguments, serving, measures=alone)
    if count != "auto" or limit.engines == 1:
        return await starter.open(limit.engines), EngineCount(limit.engines, f"{limit.reason}{starter.sharing}")
    return await starter.open_by_load(limit)


def _upper_limit(
    count: int | Literal["auto"], arguments: dict[str, Any], hosts: Hosts | None, serving: dict[str, Any]
) -> EngineCount:
    if count != "auto":
        return EngineCount(count, "rollout.engines_per_gpu")
    if hosts is not None or arguments["tensor_parallel_size"] > 1:
        return EngineCount(1, "the engine spans several GPUs")
    if not torch.cuda.is_available():
        return EngineCount(1, "there is no GPU")
    cores = len(os.sched_getaffinity(0))
    return plan.upper_limit(NvmlGpu().memory, cores, arguments["gpu_memory_utilization"], _demand(arguments, serving))


def _demand(arguments: dict[str, Any], serving: dict[str, Any]) -> Demand:
    with explained(arguments["model"]):
        model = outline(arguments["model"], arguments["trust_remote_code"])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    vocabulary = model.config.get_text_config().vocab_size
    dtype: torch.dtype = getattr(torch, arguments["dtype"])
    logits_bytes = arguments["max_num_seqs"] * vocabulary * 4
    return Demand(parameters, parameters * dtype.itemsize, logits_bytes, shadow=_shadow(serving) == "full")


class _Starter:
    """Starts engines that share ``arguments``' resources. Reads free GPU memory; create in a thread.

    ``measures``: whether vLLM may measure the memory of a single engine.
    """

    def __init__(self, arguments: dict[str, Any], serving: dict[str, Any], *, measures: bool) -> None:
        self._arguments, self._serving, self._measures = arguments, serving, measures
        self._gpu = NvmlGpu() if torch.cuda.is_available() else None
        self._demand = _demand(arguments, serving) if self._gpu else None
        self.sharing = f"; they share the GPU by {sharing()}" if self._gpu else ""

    async def open(self, engines: int) -> VllmEngine | EngineSet:
        async with self._started() as opened:
            statistics = SharedStatistics(engines)
            shares = [self._share(number, engines, self._sequences(engines)) for number in range(engines)]
            opened += await self._start(shares, 0, statistics)
            return opened[0] if engines == 1 else self._set(opened)

    async def open_by_load(self, limit: EngineCount) -> tuple[VllmEngine | EngineSet, EngineCount]:
        """Return as many engines as suit the load under the first, which gets a ``limit``-th of the memory."""
        assert self._gpu is not None
        async with self._started() as opened:
            statistics = SharedStatistics(1)
            first = self._share(0, limit.engines, self._arguments["max_num_seqs"])
            opened += await self._start([first], 0, statistics)
            choice = await self._choose(opened[0], limit)
            if choice.engines == 1:
                await opened.pop().close()
                whole = open_vllm(self._arguments, **self._serving) if self._measures else self.open(1)
                return await whole, choice
            statistics.grow(choice.engines)
            sequences = self._sequences(choice.engines)
            others = [self._share(number, choice.engines, sequences) for number in range(1, choice.engines)]
            opened += await self._start(others, 1, statistics)
            return self._set(opened), choice

    async def _choose(self, engine: VllmEngine, limit: EngineCount) -> EngineCount:
        assert self._gpu is not None
        load = asyncio.ensure_future(_decode(engine, self._arguments["max_num_seqs"]))
        try:
            await asyncio.wait({load}, timeout=_WARM_UP_S)
            busy = await self._gpu.busy_share()
        finally:
            load.cancel()
            await asyncio.wait({load})
        if not load.cancelled():
            load.result()
        if busy is None:
            return EngineCount(1, "NVML does not report how busy the GPU is")
        choice = plan.by_load(busy, limit)
        return EngineCount(choice.engines, f"{choice.reason}{self.sharing}")

    def _sequences(self, engines: int) -> int:
        return -(-int(self._arguments["max_num_seqs"]) // engines)

    def _share(self, number: int, engines: int, sequences: int) -> dict[str, Any]:
        whole = self._arguments
        own = {"max_num_seqs": sequences, "seed": (whole["seed"] + number) % (1 << 31)}
        if self._gpu is None or self._demand is None:
            return {**whole, **own}
        logits_bytes = self._demand.logits_bytes * sequences // int(whole["max_num_seqs"])
        demand = dataclasses.replace(self._demand, logits_bytes=logits_bytes)
        memory = self._gpu.memory.arguments(engines, whole["gpu_memory_utilization"], demand)
        return {**whole, **own, **memory}

    async def _start(self, shares: list[dict[str, Any]], first: int, statistics: SharedStatistics) -> list[VllmEngine]:
        loggers = await asyncio.to_thread(lambda: [statistics.factory(first + place) for place in range(len(shares))])
        starts = [
            open_vllm(share, **{**self._serving, **_role(number, self._serving)}, stat_loggers=[logger])
            for number, (share, logger) in enumerate(zip(shares, loggers, strict=True), first)
        ]
        results = await asyncio.gather(*starts, return_exceptions=True)
        engines = [result for result in results if isinstance(result, VllmEngine)]
        for result in results:
            if isinstance(result, BaseException):
                await asyncio.gather(*(engine.close() for engine in engines))
                raise result
        return engines

    def _set(self, engines: list[VllmEngine]) -> EngineSet:
        return EngineSet(engines, deadline_s=self._serving.get("deadline_s", 30.0))

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[list[VllmEngine]]:
        engines: list[VllmEngine] = []
        try:
            yield engines
        except BaseException:
            await asyncio.gather(*(engine.close() for engine in engines))
            raise


def _role(number: int, serving: dict[str, Any]) -> dict[str, Any]:
    """Return the same shadow for every engine; only the first serves weights."""
    shadow = {"shadow": _shadow(serving)}
    return shadow if number == 0 else {**shadow, "peer_host": ""}


def _shadow(serving: dict[str, Any]) -> str:
    """Return ``full``, for which memory is reserved, unless ``bucketed`` is asked for."""
    return "bucketed" if serving.get("shadow") == "bucketed" else "full"


async def _decode(engine: VllmEngine, sequences: int) -> None:
    random = np.random.default_rng(0)
    new_tokens = max(1, min(_NEW_TOKENS, engine.context_tokens - _PROMPT_TOKENS))
    sampling = Sampling(samples=_GROUP, max_new_tokens=new_tokens, temperature=1.0)
    while True:
        prompts = random.integers(0, engine.vocabulary, (-(-sequences // _GROUP), _PROMPT_TOKENS), dtype=np.int32)
        await asyncio.gather(*(engine.rehearse(GenerationRequest(prompt, sampling)) for prompt in prompts))
