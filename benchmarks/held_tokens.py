"""Processor time of a token in the replica's process and in vLLM's, with tokens handed over together and one by one.

    python -m benchmarks.held_tokens --rounds 3    # on a CPU a tiny shape, on a GPU Qwen2-0.5B's

Two engines of one process generate alternately: one with Penstock's scheduler, one with vLLM's own. Prints medians:
``front_end_us``, ``engine_us`` (all of its processes, on a CPU with the model) and ``tokens_per_s`` of each;
``front_end_ratio`` and ``rate_ratio``: together / one by one.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.decode import PROMPT_TOKENS, put, random_policy
from benchmarks.shapes import SHAPES
from penstock.services.rollout.engines.engine import GenerationRequest
from penstock.services.rollout.engines.vllm.arguments import check_version, gather
from penstock.services.rollout.engines.vllm.engine import VllmEngine
from penstock.services.rollout.engines.vllm.start import open_vllm
from penstock.shared.bus.messages import Sampling
from penstock.shared.weights.transport.offer import Offer

FIGURES = ("front_end_us", "engine_us", "tokens_per_s")


class Engine:
    """One engine, and its groups of 8 samples."""

    def __init__(self, engine: VllmEngine, processes: set[psutil.Process], groups: int, new_tokens: int) -> None:
        self.engine = engine
        self._processes = processes
        self._groups, self._sampling = groups, Sampling(samples=8, max_new_tokens=new_tokens, temperature=1.0)
        self._lot = np.random.default_rng(0)

    async def figures(self) -> tuple[float, float, float]:
        """Generate all groups; return processor time of a token here and there in microseconds, and tokens per second."""
        prompts = self._lot.integers(2, 100, (self._groups, PROMPT_TOKENS)).astype(np.int32)
        started_s, here_s, there_s = time.monotonic(), time.process_time(), self._used_s()
        made = await asyncio.gather(
            *(self.engine.generate(GenerationRequest(prompt, self._sampling)) for prompt in prompts)
        )
        here_s, there_s = time.process_time() - here_s, self._used_s() - there_s
        tokens = sum(len(sample.token_ids) for group in made for sample in group.samples)
        return here_s / tokens * 1e6, there_s / tokens * 1e6, tokens / (time.monotonic() - started_s)

    def _used_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)


async def opened(folder: Path, offer: Offer, groups: int, new_tokens: int, plain: str) -> Engine:
    """Start an engine, with vLLM's scheduler ``plain`` unless it is empty."""
    on_gpu = torch.cuda.device_count() > 0
    before = set(psutil.Process().children(recursive=True))
    engine = await open_vllm(
        gather(
            str(folder / "policy"),
            dtype="bfloat16" if on_gpu else "float32",
            seed=0,
            max_num_seqs=groups * 8,
            max_model_len=PROMPT_TOKENS + new_tokens,
            gpu_memory_utilization=0.35,
            enforce_eager=not on_gpu,
            arguments={"scheduler_cls": plain} if plain else {},
        )
    )
    await put(engine, offer)
    return Engine(engine, set(psutil.Process().children(recursive=True)) - before, groups, new_tokens)


async def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Return the result."""
    on_gpu = torch.cuda.device_count() > 0
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; default: a share of the machine's memory
    shape, dtype = (SHAPES["0.5b"], torch.bfloat16) if on_gpu else (SHAPES["tiny"], torch.float32)
    groups, new_tokens = (64, 512) if on_gpu else (32, 128)
    offer = await asyncio.to_thread(random_policy, folder, shape, dtype)
    plain = "async_scheduler.AsyncScheduler" if on_gpu else "scheduler.Scheduler"
    ways = {"together": "", "one by one": f"vllm.v1.core.sched.{plain}"}
    engines = {name: await opened(folder, offer, groups, new_tokens, way) for name, way in ways.items()}
    measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    try:
        for _ in range(rounds + 1):
            for name, engine in engines.items():
                measured[name].append(await engine.figures())
    finally:
        for engine in engines.values():
            await engine.engine.close()
    medians = {name: [statistics.median(each) for each in zip(*of[1:], strict=True)] for name, of in measured.items()}
    together, apart = medians["together"], medians["one by one"]
    return {
        "front_end_ratio": round(together[0] / apart[0], 3),
        "rate_ratio": round(together[2] / apart[2], 3),
        **{
            name: {figure: round(value, 2) for figure, value in zip(FIGURES, of, strict=True)}
            for name, of in medians.items()
        },
        "work": f"{groups} groups of 8, {new_tokens} new tokens",
        "device": torch.cuda.get_device_name(0) if on_gpu else "cpu",
        "load": round(os.getloadavg()[0], 1),
        "versions": {"vllm": check_version(), "torch": torch.__version__},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(Path(folder), arguments.rounds))))


if __name__ == "__main__":
    main()
