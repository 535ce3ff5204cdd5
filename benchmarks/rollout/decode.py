"""Cost of behavior logprobs in vLLM: without, captured by Penstock's hook, returned by vLLM.

One engine runs them alternately. On a GPU: Qwen2-0.5B's shape in bfloat16, random weights, 64 groups of 8 samples of
512 tokens. On a CPU: a tiny shape.

    python -m benchmarks.rollout.decode --rounds 4
    python -m benchmarks.rollout.decode --rounds 3 --engines 1 2 3 4 auto vllm    # several engines on one GPU
    python -m benchmarks.rollout.decode --rounds 1 --engines 1 2 --groups 4 16 32 64 --shape 7b

Prints median ``ratio`` (captured / none), ``native_ratio`` (vLLM / none), ``max_abs_difference`` (nats). ``--engines``:
by number of engines and of sequences tokens per second, ``gpu`` and ``step_ms``, milliseconds in which each sequence
grows by a token, its prompt included; ``over_first``, ratio to the first number of engines with the most sequences.
``single`` is one engine with steps of one token, drawn by vLLM's sampler; ``vllm`` that one with vLLM's own scheduler.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rollout.decode_engines import EngineComparison
from benchmarks.rollout.policy import PROMPT_TOKENS, put, random_policy
from benchmarks.shapes import SHAPES
from penstock.services.rollout.engines.engine import GenerationRequest
from penstock.services.rollout.engines.vllm.arguments import check_version, gather
from penstock.services.rollout.engines.vllm.engine import VllmEngine
from penstock.services.rollout.engines.vllm.start import open_vllm
from penstock.shared.bus.messages import Sampling


class Work:
    """One engine's groups; each way returns tokens per second."""

    def __init__(self, engine: VllmEngine, groups: int, samples: int, new_tokens: int) -> None:
        self._engine = engine
        self._sampling = Sampling(samples=samples, max_new_tokens=new_tokens, temperature=1.0)
        self._lot = np.random.default_rng(0)
        self._groups = groups
        self._requests = 0

    async def none(self) -> float:
        """Without logprobs."""
        return await self._through_vllm(logprobs=False)

    async def native(self) -> float:
        """With vLLM's logprobs, as arrays."""
        return await self._through_vllm(logprobs=True)

    async def captured(self) -> float:
        """With the rollout service's capture."""
        await self._engine._call("penstock_listen", True)
        started_s = time.monotonic()
        groups = await asyncio.gather(*(self._engine.generate(request) for request in self._prompts()))
        seconds = time.monotonic() - started_s
        return sum(len(sample.token_ids) for group in groups for sample in group.samples) / seconds

    async def difference(self) -> float:
        """Return the largest difference (nats) of captured and vLLM's logprobs."""
        await self._engine._call("penstock_listen", True)
        return max(await asyncio.gather(*(self._difference(request) for request in self._prompts())))

    def _prompts(self) -> list[GenerationRequest]:
        ids = self._lot.integers(0, self._engine.vocabulary, (self._groups, PROMPT_TOKENS), dtype=np.int32)
        return [GenerationRequest(row, self._sampling) for row in ids]

    async def _through_vllm(self, logprobs: bool) -> float:
        await self._engine._call("penstock_listen", False)
        started_s = time.monotonic()
        tokens = await asyncio.gather(*(self._run(request, logprobs) for request in self._prompts()))
        return sum(tokens) / (time.monotonic() - started_s)

    async def _run(self, request: GenerationRequest, logprobs: bool) -> int:
        self._requests += 1
        finished = await self._engine._requests.run(
            f"b{self._requests}", request.prompt_token_ids, "benchmark", self._parameters(request, logprobs)
        )
        arrays = [np.array(output.token_ids, dtype=np.int32) for output in finished.outputs]
        if logprobs:
            assert all(
                len(_native(output)) == len(array) for output, array in zip(finished.outputs, arrays, strict=True)
            )
        return sum(len(array) for array in arrays)

    def _parameters(self, request: GenerationRequest, logprobs: bool) -> Any:
        parameters = self._engine._requests.parameters(request, request.sampling.samples)
        parameters.logprobs, parameters.flat_logprobs = (0, True) if logprobs else (None, False)
        return parameters

    async def _difference(self, request: GenerationRequest) -> float:
        self._requests += 1
        name = f"g{10**9 + self._requests}"
        self._engine._reports.expect(name)
        finished = await self._engine._requests.run(
            name, request.prompt_token_ids, "d", self._parameters(request, True)
        )
        rows = await self._engine._requests.rows(name, request.sampling.samples)
        pairs = zip(sorted(finished.outputs, key=lambda output: int(output.index)), rows, strict=True)
        return max(
            float(np.abs(_native(output) - row.logprobs[: len(output.token_ids)]).max()) for output, row in pairs
        )


def _native(output: Any) -> Any:
    return np.array(output.logprobs.logprobs, dtype=np.float32)


async def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Return the result."""
    on_gpu = torch.cuda.device_count() > 0
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; default: a share of the machine's memory
    shape, dtype = (SHAPES["0.5b"], torch.bfloat16) if on_gpu else (SHAPES["tiny"], torch.float32)
    groups, samples, new_tokens = (64, 8, 512) if on_gpu else (8, 4, 64)
    offer = await asyncio.to_thread(random_policy, folder, shape, dtype)
    engine = await open_vllm(
        gather(
            str(folder / "policy"),
            dtype=str(dtype).removeprefix("torch."),
            seed=0,
            max_num_seqs=groups * samples,
            max_model_len=PROMPT_TOKENS + new_tokens,
            enforce_eager=not on_gpu,
        )
    )
    try:
        report = await put(engine, offer)
        work = Work(engine, groups, samples, new_tokens)
        rates: dict[str, list[float]] = {"none": [], "captured": [], "native": []}
        for number in range(rounds + 1):
            names = ["none", "captured", "native"]
            for name in names[number % 3 :] + names[: number % 3]:
                rates[name].append(await getattr(work, name)())
                print(f"round {number}, {name}: {rates[name][-1]:,.0f} tokens/s", file=sys.stderr, flush=True)
        difference = await work.difference()
    finally:
        await engine.close()
    measured = {name: rounds[1:] for name, rounds in rates.items()}
    return {
        "ratio": _ratio(measured["captured"], measured["none"]),
        "native_ratio": _ratio(measured["native"], measured["none"]),
        "max_abs_difference": difference,
        "tokens_per_s": {name: [round(rate) for rate in of_way] for name, of_way in measured.items()},
        "swap": {"path": report.path, "seconds": round(report.seconds, 4), "copied_bytes": report.copied_bytes},
        "work": f"{groups} groups of {samples}, {new_tokens} new tokens",
        "device": torch.cuda.get_device_name(0) if on_gpu else "cpu",
        "versions": {"vllm": check_version(), "torch": torch.__version__},
    }


def _ratio(rates: list[float], base: list[float]) -> float:
    return round(statistics.median(rate / other for rate, other in zip(rates, base, strict=True)), 4)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--engines", nargs="+", choices=(*map(str, range(1, 9)), "auto", "single", "vllm"), help="engines on one GPU"
    )
    parser.add_argument(
        "--groups", nargs="+", type=int, help="with --engines: of 8 samples on a GPU (default 64), 4 on a CPU (8)"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), help="with --engines; default: 0.5b on a GPU, tiny on a CPU")
    arguments = parser.parse_args()
    if (arguments.groups or arguments.shape) and not arguments.engines:
        parser.error("expected --engines with --groups and --shape, found none: add it")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.engines:
            measuring = EngineComparison(
                Path(folder), arguments.engines, arguments.rounds, arguments.groups, arguments.shape
            ).measure()
        else:
            measuring = measure(Path(folder), arguments.rounds)
        print(json.dumps(asyncio.run(measuring)))


if __name__ == "__main__":
    main()
