"""Completions as long as a model's context from a vLLM engine, and what the trainer makes of their logprobs.

    python -m benchmarks.rollout.long_rollouts --limit-s 290 --layers 1 --samples 2    # on a GPU: 131,072 tokens
    python -m benchmarks.rollout.long_rollouts --tokens 8192             # on a CPU

A random policy of few layers without a stop token. First a sixteenth of ``--tokens``, then as many as ``--limit-s``
leaves time for, at the first part's rate, in a prompt of ``--prompt`` tokens, which is read in parts. Prints of each part:

    token_ms          milliseconds in which all samples grow by a token
    gap               of each sample, largest and mean difference (nats) of a recorded logprob from that of the trainer's
                      policy for the same tokens; ``spread`` is these logprobs' standard deviation
    record_bytes      the worker's record of logprobs, and ``planned_record_bytes``
    cache_tokens      room of the engine's key-value cache, and ``needed_tokens``
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rollout.policy import put, random_policy
from benchmarks.shapes import SHAPES
from penstock.services.plan.memory import record_bytes
from penstock.services.rollout.engines.engine import GeneratedGroup, GenerationRequest
from penstock.services.rollout.engines.vllm.arguments import check_version, gather
from penstock.services.rollout.engines.vllm.engine import VllmEngine
from penstock.services.rollout.engines.vllm.start import open_vllm, start_server
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.model.policy import Policy, load_model
from penstock.shared.bus.messages import FinishReason, Sample, Sampling
from penstock.shared.settings import PolicySettings

_PARTS = 16
_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""Without torch.compile, which takes a minute."""
_CACHE_BYTES, _BLOCK_TOKENS = 2 << 30, 128
_SLOWER = 1.25
"""Of the rate, as attention reads more."""
Figures = dict[str, Any]


def shape(layers: int, tokens: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "max_position_embeddings": tokens, "initializer_range": 0.2}  # tokens differ
    return {**SHAPES["tiny"], **sizes}


async def generated(engine: VllmEngine, prompt: Any, tokens: int, samples: int) -> tuple[GeneratedGroup, Figures]:
    """Return a group of ``samples`` completions of ``tokens``."""
    sampling = Sampling(samples, tokens, 1.0)
    started_s = time.monotonic()
    group = await engine.generate(GenerationRequest(prompt, sampling, 1))
    seconds = time.monotonic() - started_s
    lengths = [len(sample.token_ids) for sample in group.samples]
    return group, {
        "tokens": tokens,
        "lengths": lengths,
        "seconds": round(seconds, 2),
        "token_ms": round(1000 * seconds / tokens, 4),
        "tokens_per_s": round(sum(lengths) / seconds, 1),
        "complete": all(length == tokens for length in lengths),
        "spread": round(float(np.std(np.concatenate([sample.behavior_logprobs for sample in group.samples]))), 2),
        "finite": all(bool(np.isfinite(sample.behavior_logprobs).all()) for sample in group.samples),
    }


@torch.no_grad()
def gaps(policy: Policy, prompt: Any, group: GeneratedGroup) -> list[list[float]]:
    """Return each sample's largest difference of a logprob from the policy's, and the mean one."""
    differences = []
    for sample in group.samples:
        taught = Sample(sample.token_ids, sample.behavior_logprobs, sample.version_spans, FinishReason.LENGTH, "")
        out = policy(micro_batch([PackedRow(prompt, (taught,), (0,))])).policy_logprobs_N.float().cpu().numpy()
        apart = np.abs(out - sample.behavior_logprobs)
        differences.append([round(float(apart.max()), 6), round(float(apart.mean()), 6)])
    return differences


async def measure(arguments: argparse.Namespace, folder: Path, shown: Figures) -> None:
    """Fill ``shown``, part by part."""
    on_gpu = torch.cuda.device_count() > 0
    started_s = time.monotonic()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; default: a share of the machine's memory
    dtype = torch.bfloat16 if on_gpu else torch.float32
    longest = arguments.prompt + arguments.tokens
    offer = await asyncio.to_thread(random_policy, folder, shape(arguments.layers, longest), dtype)
    more: Figures = {"max_num_batched_tokens": arguments.chunk}
    if arguments.cache:
        more["num_gpu_blocks_override"] = -(-arguments.cache // _BLOCK_TOKENS)
        more["block_size"] = _BLOCK_TOKENS
    if on_gpu:
        more |= {
            "kv_cache_memory_bytes": _CACHE_BYTES,
            "compilation_config": {**_GRAPHS, "cudagraph_capture_sizes": [1, 2, arguments.samples]},
        }
    engine = await open_vllm(
        gather(
            str(folder / "policy"), dtype=str(dtype).removeprefix("torch."), seed=0, max_num_seqs=arguments.samples,
            max_model_len=longest, enforce_eager=not on_gpu, gpu_memory_utilization=arguments.utilization, arguments=more,
        )
    )  # fmt: skip
    lot = np.random.default_rng(0)
    prompt = lot.integers(0, SHAPES["tiny"]["vocab_size"], arguments.prompt, dtype=np.int32)
    groups: dict[str, GeneratedGroup] = {}
    try:
        await put(engine, offer)
        cache = engine._llm.vllm_config.cache_config
        shown["cache_tokens"] = int(cache.num_gpu_blocks or 0) * int(cache.block_size)
        shown["needed_tokens"] = arguments.samples * longest
        shown["planned_record_bytes"] = record_bytes(arguments.samples, arguments.tokens)
        shown["start_s"] = round(time.monotonic() - started_s, 1)
        while arguments.when and not arguments.when.exists():
            await asyncio.sleep(0.2)
        print(json.dumps(shown), flush=True)
        await generated(engine, prompt, max(1, arguments.tokens // _PARTS**2), arguments.samples)  # compiles kernels
        name, tokens = "first", max(1, arguments.tokens // _PARTS)
        groups[name], shown[name] = await generated(engine, prompt, tokens, arguments.samples)
        print(json.dumps(shown), flush=True)
        left_s = arguments.limit_s - (time.monotonic() - started_s)
        fitting = int(left_s / (_SLOWER * shown[name]["token_ms"] / 1000))
        tokens = min(arguments.tokens, fitting)
        if tokens > arguments.tokens // _PARTS:
            groups["whole"], shown["whole"] = await generated(engine, prompt, tokens, arguments.samples)
            print(json.dumps(shown), flush=True)
    finally:
        await engine.close()
    policy = Policy(load_model(PolicySettings(model=str(folder / "policy")), dtype), chunk_tokens=2048)
    policy = policy.to("cuda" if on_gpu else "cpu").eval()
    for name, group in groups.items():
        shown[name]["gap"] = gaps(policy, prompt, group)
        print(json.dumps(shown), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--prompt", type=int, default=5000)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prompt that are read in a step, at most")
    parser.add_argument(
        "--cache", type=int, default=0, help="tokens of the key-value cache, with few of which requests wait"
    )
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--utilization", type=float, default=0.06)
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--when", type=Path, help="a file: the engine starts, and decodes once the file is there")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    shown: Figures = {
        "benchmark": "long_rollouts",
        "device": torch.cuda.get_device_name() if torch.cuda.device_count() else "cpu",
        "versions": {"vllm": check_version(), "torch": torch.__version__},
        **{name: getattr(arguments, name) for name in ("tokens", "prompt", "chunk", "cache", "samples", "layers")},
    }
    start_server()  # imports vLLM while the policy is made
    try:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(measure(arguments, Path(folder), shown))
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        shown["failed"] = traceback.format_exc().splitlines()[-1]
        raise
    finally:
        if arguments.out:
            arguments.out.write_text(json.dumps(shown, indent=1) + "\n")
        print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
