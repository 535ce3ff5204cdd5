"""Decode throughput with one to four vLLM engines on one GPU (``benchmarks.decode --engines``).

Fixed numbers share engines that start once; ``auto`` starts separately and chooses by itself.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.decode import PROMPT_TOKENS, put, random_policy
from benchmarks.gpu_meter import gpu_meter
from benchmarks.shapes import SHAPES
from services.rollout.engines.engine import Engine, GenerationRequest
from services.rollout.engines.vllm.arguments import check_version, gather
from services.rollout.engines.vllm.several.engine_set import EngineSet
from services.rollout.engines.vllm.several.gpu import sharing
from services.rollout.engines.vllm.several.start import open_engines
from shared.bus.messages import Sampling


class EngineComparison:
    """The same work for different numbers of engines.

    Args:
        counts: numbers, and optionally ``"auto"``.
    """

    def __init__(self, folder: Path, counts: Sequence[str], rounds: int) -> None:
        self._folder, self._rounds = folder, rounds
        self._fixed = [int(count) for count in counts if count != "auto"]
        self._auto = "auto" in counts
        self._on_gpu = torch.cuda.device_count() > 0
        self._groups, self._samples, self._new_tokens = (64, 8, 512) if self._on_gpu else (8, 4, 64)
        self._random = np.random.default_rng(0)
        self._offer: Any = None

    async def measure(self) -> dict[str, Any]:
        """Return the result."""
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; default: a share of the machine's memory
        dtype = torch.bfloat16 if self._on_gpu else torch.float32
        shape = SHAPES["0.5b" if self._on_gpu else "tiny"]
        self._offer = await asyncio.to_thread(random_policy, self._folder, shape, dtype)
        rates, figures = await self._measure_fixed() if self._fixed else ({}, {})
        if self._auto:
            figures["auto"] = await self._measure_auto()
        first = rates.get(str(self._fixed[0])) if self._fixed else None
        return {
            "over_first": {
                count: round(statistics.median(a / b for a, b in zip(measured, first or measured, strict=True)), 3)
                for count, measured in rates.items()
            },
            "engines": figures,
            "sharing": sharing(),
            "work": f"{self._groups} groups of {self._samples}, {self._new_tokens} new tokens",
            "device": torch.cuda.get_device_name(0) if self._on_gpu else "cpu",
            "cores": os.cpu_count(),
            "versions": {"vllm": check_version(), "torch": torch.__version__},
        }

    async def _measure_fixed(self) -> tuple[dict[str, list[float]], dict[str, Any]]:
        most = max(self._fixed)
        started_s = time.monotonic()
        opened, choice = await open_engines(max(2, most), self._arguments(max(2, most)))
        opened.share_secret(b"benchmark")
        start_s = time.monotonic() - started_s
        assert isinstance(opened, EngineSet)
        rates: dict[str, list[float]] = {str(count): [] for count in self._fixed}
        gpus: dict[str, list[dict[str, Any]]] = {str(count): [] for count in self._fixed}
        try:
            await put(opened, self._offer)
            for number in range(self._rounds + 1):
                turn = number % len(self._fixed)
                for count in self._fixed[turn:] + self._fixed[:turn]:
                    part = EngineSet(opened.engines[:count], deadline_s=60.0)
                    rate, gpu = await self._decode(part)
                    if number:  # the first round warms up
                        rates[str(count)].append(rate)
                        gpus[str(count)].append(gpu)
        finally:
            await opened.close()
        figures: dict[str, Any] = {
            count: {"tokens_per_s": [round(rate) for rate in measured], "gpu": gpus[count]}
            for count, measured in rates.items()
        }
        return rates, {**figures, "start_s": round(start_s, 1), "started": choice.reason}

    async def _measure_auto(self) -> dict[str, Any]:
        started_s = time.monotonic()
        opened, choice = await open_engines("auto", self._arguments(1))
        opened.share_secret(b"benchmark")
        start_s = time.monotonic() - started_s
        try:
            await put(opened, self._offer)
            rows = [await self._decode(opened) for _ in range(self._rounds + 1)][1:]
        finally:
            await opened.close()
        return {
            "chosen": choice.engines,
            "reason": choice.reason,
            "start_s": round(start_s, 1),
            "tokens_per_s": [round(rate) for rate, _ in rows],
            "gpu": [gpu for _, gpu in rows],
        }

    def _arguments(self, engines: int) -> dict[str, Any]:
        return gather(
            str(self._folder / "policy"),
            dtype="bfloat16" if self._on_gpu else "float32",
            seed=0,
            max_num_seqs=engines * self._groups * self._samples,
            max_model_len=PROMPT_TOKENS + self._new_tokens,
            enforce_eager=not self._on_gpu,
        )

    async def _decode(self, engine: Engine) -> tuple[float, dict[str, Any]]:
        vocabulary = int(SHAPES["0.5b" if self._on_gpu else "tiny"]["vocab_size"])
        sampling = Sampling(samples=self._samples, max_new_tokens=self._new_tokens, temperature=1.0)
        prompts = self._random.integers(0, vocabulary, (self._groups, PROMPT_TOKENS), dtype=np.int32)
        with gpu_meter() as meter:
            began_s = time.time()
            groups = await asyncio.gather(*(engine.generate(GenerationRequest(row, sampling)) for row in prompts))
            ended_s = time.time()
        tokens = sum(len(sample.token_ids) for group in groups for sample in group.samples)
        return tokens / (ended_s - began_s), meter.figures(began_s, ended_s).get("0", {})
