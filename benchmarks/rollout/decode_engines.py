"""Decode throughput with several vLLM engines on one GPU (``benchmarks.rollout.decode --engines``).

Fixed numbers share engines that start once; ``auto``, ``single`` and ``vllm`` start separately.
"""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.gpu_meter import gpu_meter
from benchmarks.rollout.policy import PROMPT_TOKENS, put, random_policy
from benchmarks.shapes import SHAPES
from penstock.services.rollout.engines.engine import Engine, GenerationRequest
from penstock.services.rollout.engines.vllm.arguments import check_version, gather
from penstock.services.rollout.engines.vllm.scheduling import plain_decoding
from penstock.services.rollout.engines.vllm.several.engine_set import EngineSet
from penstock.services.rollout.engines.vllm.several.gpu import sharing
from penstock.services.rollout.engines.vllm.several.start import open_engines
from penstock.services.rollout.engines.vllm.worker import WorkerExtension
from penstock.shared.bus.messages import Sampling


class SingleSteps(WorkerExtension):
    """Takes steps of one token, drawn by vLLM's sampler."""

    def penstock_open(self, *given: Any) -> dict[str, Any]:
        plain_decoding.MOST_EACH = 1
        opened = super().penstock_open(*given)
        self._policy.tap._quick = None
        return opened


class EngineComparison:
    """The same work for different numbers of engines and of groups.

    Args:
        counts: numbers of engines; ``"auto"``; ``"single"``, one engine with :class:`SingleSteps`; ``"vllm"``, that one
            with vLLM's own scheduler. The latter three are measured with the most groups.
        groups: default: 64 on a GPU, 8 on a CPU.
        shape: default: 0.5b on a GPU, tiny on a CPU.
    """

    def __init__(
        self,
        folder: Path,
        counts: Sequence[str],
        rounds: int,
        groups: Sequence[int] | None = None,
        shape: str | None = None,
    ) -> None:
        self._folder, self._rounds = folder, rounds
        self._fixed = [int(count) for count in counts if count.isdigit()]
        self._auto, self._single, self._theirs = ("auto" in counts, "single" in counts, "vllm" in counts)
        self._on_gpu = torch.cuda.device_count() > 0
        self._samples, self._new_tokens = (8, 512) if self._on_gpu else (4, 64)
        self._groups = sorted(groups or [64 if self._on_gpu else 8])
        self._shape = shape or ("0.5b" if self._on_gpu else "tiny")
        self._random = np.random.default_rng(0)
        self._offer: Any = None

    async def measure(self) -> dict[str, Any]:
        """Return the result."""
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; default: a share of the machine's memory
        dtype = torch.bfloat16 if self._on_gpu else torch.float32
        self._offer = await asyncio.to_thread(random_policy, self._folder, SHAPES[self._shape], dtype)
        measured = await self._measure_fixed() if self._fixed else {}
        if self._auto:
            measured["auto"] = await self._measure_alone("auto")
        single = {"worker_extension_cls": f"{SingleSteps.__module__}.{SingleSteps.__name__}"}
        if self._single:
            measured["single"] = await self._measure_alone(1, **single)
        if self._theirs:
            kind = "async_scheduler.AsyncScheduler" if self._on_gpu else "scheduler.Scheduler"
            measured["vllm"] = await self._measure_alone(1, scheduler_cls=f"vllm.v1.core.sched.{kind}", **single)
        return {
            "over_first": self._over_first(measured["engines"]) if self._fixed else {},
            **measured,
            "sharing": sharing(),
            "work": f"{self._shape}: groups of {self._samples}, {PROMPT_TOKENS} + {self._new_tokens} tokens",
            "device": torch.cuda.get_device_name(0) if self._on_gpu else "cpu",
            "cores": os.cpu_count(),
            "versions": {"vllm": check_version(), "torch": torch.__version__},
        }

    def _over_first(self, engines: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        most = str(self._groups[-1] * self._samples)
        rates = {count: of_count[most]["tokens_per_s"] for count, of_count in engines.items()}
        first = rates[str(self._fixed[0])]
        return {
            count: round(statistics.median(a / b for a, b in zip(measured, first, strict=True)), 3)
            for count, measured in rates.items()
        }

    async def _measure_fixed(self) -> dict[str, Any]:
        most = max(self._fixed)
        started_s = time.monotonic()
        opened, choice = await open_engines(max(2, most), self._arguments(max(2, most)))
        opened.share_secret(b"benchmark")
        start_s = time.monotonic() - started_s
        assert isinstance(opened, EngineSet)
        runs: dict[tuple[int, int], list[tuple[float, dict[str, Any]]]] = {
            (count, groups): [] for count in self._fixed for groups in self._groups
        }
        try:
            await put(opened, self._offer)
            for number in range(self._rounds + 1):
                turn = number % len(self._fixed)
                for count in self._fixed[turn:] + self._fixed[:turn]:
                    part = EngineSet(opened.engines[:count], deadline_s=60.0)
                    for groups in self._groups:
                        run = await self._decode(part, groups)
                        if number:  # the first round warms up
                            runs[count, groups].append(run)
        finally:
            await opened.close()
        engines: dict[str, dict[str, Any]] = {str(count): {} for count in self._fixed}
        for (count, groups), rows in runs.items():
            engines[str(count)][str(groups * self._samples)] = self._figures(rows, groups)
        return {"engines": engines, "start_s": round(start_s, 1), "started": choice.reason}

    def _figures(self, rows: Sequence[tuple[float, dict[str, Any]]], groups: int) -> dict[str, Any]:
        rates = [rate for rate, _ in rows]
        return {
            "tokens_per_s": [round(rate) for rate in rates],
            "step_ms": round(1e3 * groups * self._samples / statistics.median(rates), 3),
            "gpu": [gpu for _, gpu in rows],
        }

    async def _measure_alone(self, engines: int | Literal["auto"], **arguments: Any) -> dict[str, Any]:
        started_s = time.monotonic()
        opened, choice = await open_engines(engines, {**self._arguments(1), **arguments})
        opened.share_secret(b"benchmark")
        start_s = time.monotonic() - started_s
        most = self._groups[-1]
        try:
            await put(opened, self._offer)
            rows = [await self._decode(opened, most) for _ in range(self._rounds + 1)][1:]
        finally:
            await opened.close()
        figures = self._figures(rows, most)
        print(f"{engines}, {arguments}: {figures['tokens_per_s']} tokens/s", file=sys.stderr, flush=True)
        return {"chosen": choice.engines, "reason": choice.reason, "start_s": round(start_s, 1), **figures}

    def _arguments(self, engines: int) -> dict[str, Any]:
        return gather(
            str(self._folder / "policy"),
            dtype="bfloat16" if self._on_gpu else "float32",
            seed=0,
            max_num_seqs=engines * self._groups[-1] * self._samples,
            max_model_len=PROMPT_TOKENS + self._new_tokens,
            enforce_eager=not self._on_gpu,
        )

    async def _decode(self, engine: Engine, groups: int) -> tuple[float, dict[str, Any]]:
        vocabulary = int(SHAPES[self._shape]["vocab_size"])
        sampling = Sampling(samples=self._samples, max_new_tokens=self._new_tokens, temperature=1.0)
        prompts = self._random.integers(0, vocabulary, (groups, PROMPT_TOKENS), dtype=np.int32)
        with gpu_meter() as meter:
            began_s = time.time()
            made = await asyncio.gather(*(engine.generate(GenerationRequest(row, sampling)) for row in prompts))
            ended_s = time.time()
        tokens = sum(len(sample.token_ids) for group in made for sample in group.samples)
        return tokens / (ended_s - began_s), meter.figures(began_s, ended_s).get("0", {})
