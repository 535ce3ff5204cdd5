"""Mismatch of replicas and trainer for a random mixture of experts, with live and with replayed routes.

    python -m benchmarks.trainer.router_replay
    python -m benchmarks.trainer.router_replay --engine vllm --size large         a GPU, or minutes of a CPU
    python -m benchmarks.trainer.router_replay --engine vllm --size 30b-a3b-8 --groups 32    one GPU of 80 GB

An engine draws completions in bfloat16 and records the experts of each token; the trainer's model scores them in packed
rows, in bfloat16, too. ``kl`` is the mean of exp(d) − 1 − d over tokens, d = trainer's − engine's logprob: an estimate of
KL(engine ‖ trainer). ``same_experts`` is the share of (token, layer) pairs for which both choose the same experts by
themselves; ``bus_ratio_1024`` what a sample of 1,024 tokens takes on the bus with its claim, by what it takes without. With vLLM a second engine without
records decodes the same in turn: ``rate_ratio`` is the median rate with records by that without. vLLM records no prompts
but their last token. Both engines start at once; they have CUDA graphs, and with ``--compile`` torch.compile, which takes a
minute. Fails if the routes of a sample are missing, or replay leaves more than 0.4 of the mismatch.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks import record
from benchmarks.record import tell
from benchmarks.rollout.policy import put
from penstock.services.rollout.engines.engine import GeneratedSample, GenerationRequest, with_texts
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.model.routing import replay
from penstock.shared.bus.claims import Claim, Holder
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import (
    FinishReason,
    GroupId,
    PolicyRecord,
    PolicyVersion,
    Prompt,
    RolloutGroup,
    Sample,
    Sampling,
)
from penstock.shared.weights.format.snapshot import write_snapshot
from penstock.shared.weights.receiver.puller import file_offer

SIZES: dict[str, dict[str, int]] = {
    "small": {
        "hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 32, "num_experts_per_tok": 4,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    },
    "large": {
        "hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 32_768,
    },
    "30b-a3b-8": {  # 8 of Qwen3-30B-A3B's 48 layers
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 32_768,
    },
}  # fmt: skip
MOST = 0.4
"""Of the mismatch with live routes."""
_COMPARED = 32
"""Groups."""
_SPREAD = 1.5
"""Standard deviation of a router's scores, so that it chooses as clearly as a trained one."""


def build(size: str, device: str) -> Any:
    torch.manual_seed(0)
    shape = SIZES[size]
    config = Qwen3MoeConfig(
        **shape, intermediate_size=shape["hidden_size"], decoder_sparse_step=1, norm_topk_prob=True,
        tie_word_embeddings=False, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
        initializer_range=shape["hidden_size"] ** -0.5,
    )  # fmt: skip
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.normal_(0.0, _SPREAD / shape["hidden_size"] ** 0.5)
    return model.eval().requires_grad_(False)


def prompts(groups: int, tokens: int, vocabulary: int) -> list[np.ndarray]:
    """Prompts, of which each second one begins as the one before it."""
    generator = np.random.default_rng(0)
    drawn = [generator.integers(0, vocabulary, tokens).astype(np.int32) for _ in range(groups)]
    return [np.concatenate([drawn[n - n % 2][: tokens // 2], each[tokens // 2 :]]) for n, each in enumerate(drawn)]


@torch.inference_mode()
def by_transformers(model: Any, requests: Sequence[GenerationRequest], device: str) -> list[Sequence[GeneratedSample]]:
    from penstock.services.rollout.engines.transformers.decoding import Batch, Tokens
    from penstock.services.rollout.engines.transformers.routes import RouteRecorder

    decoding = Batch(model, requests, Tokens(()), torch.device(device), RouteRecorder(model))
    finished: dict[int, Sequence[GeneratedSample]] = {}
    while not decoding.finished:
        finished.update(decoding.step(PolicyVersion(0)))
    return [finished[place] for place in range(len(requests))]


async def by_vllm(
    model: Any, requests: Sequence[GenerationRequest], folder: Path, rounds: int, cache_gb: float, *, compiled: bool
) -> tuple[list[Sequence[GeneratedSample]], dict[str, Any]]:
    """Return what an engine that records draws in the last round, and the rates with and without records."""
    from penstock.services.rollout.engines.vllm.arguments import ROUTING, gather
    from penstock.services.rollout.engines.vllm.engine import VllmEngine
    from penstock.services.rollout.engines.vllm.start import open_vllm

    on_gpu, samples = model.device.type == "cuda", sum(request.sampling.samples for request in requests)
    graphs = {} if compiled else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder / "policy")
    more: dict[str, Any] = {"kv_cache_memory_bytes": int(cache_gb * 1e9)} if on_gpu else {}
    if on_gpu:
        more["compilation_config"] = {**graphs, "cudagraph_capture_sizes": sorted({1, 8, 64, samples})}
    gathered = gather(
        str(folder / "policy"), dtype="bfloat16", seed=0, max_num_seqs=samples, gpu_memory_utilization=0.1,
        max_model_len=4096, enforce_eager=not on_gpu, arguments=more,
    )  # fmt: skip
    gathered["load_format"] = "dummy"
    extensions = {"without": gathered["worker_extension_cls"], "with": ROUTING}
    rates: dict[str, list[float]] = {name: [] for name in extensions}
    groups: list[Sequence[GeneratedSample]] = []
    async with contextlib.AsyncExitStack() as closing:

        async def opened(name: str) -> VllmEngine:
            engine = await open_vllm({**gathered, "worker_extension_cls": extensions[name]})
            closing.push_async_callback(engine.close)
            tell(f"the engine {name} records has started")
            return engine

        async with asyncio.TaskGroup() as together:
            opening = {name: together.create_task(opened(name)) for name in extensions}
            weights = asyncio.to_thread(
                write_snapshot, folder / "weights", PolicyVersion(0), 0, model.named_parameters(), torch.bfloat16
            )
            written = await together.create_task(weights)
            tell(f"{written.nbytes / 1e9:.1f} GB of weights are written")
        engines = {name: task.result() for name, task in opening.items()}
        offered = PolicyRecord(PolicyVersion(0), None, 0, 0.0, written.digest, str(written.location))
        for name, engine in engines.items():
            await put(engine, file_offer(offered, 120.0))
            await asyncio.gather(*map(engine.generate, requests))
            tell(f"the engine {name} records has decoded once")
        for number in range(2 * rounds):
            name = list(rates)[(number + number // 2) % 2]  # in the order a b b a
            began_s = time.perf_counter()
            generated = await asyncio.gather(*map(engines[name].generate, requests))
            elapsed_s = time.perf_counter() - began_s
            rates[name].append(sum(len(of.token_ids) for each in generated for of in each.samples) / elapsed_s)
            tell(f"{name} records: {rates[name][-1]:.0f} tokens/s")
            groups = [each.samples for each in generated] if name == "with" else groups
    median = {name: statistics.median(of) for name, of in rates.items()}
    rounded = {name: [round(rate) for rate in of] for name, of in rates.items()}
    return groups, {"tokens_per_s": rounded, "rate_ratio": median["with"] / median["without"]}


@torch.no_grad()
def compare(model: Any, requests: Sequence[GenerationRequest], groups: Sequence[Sequence[GeneratedSample]]) -> Any:
    """Return the figures of both kinds of routes; some groups a pass."""
    policy = Policy(model, chunk_tokens=4096).eval()
    plan = policy.trunk.replay = replay.install(policy.model)
    chosen: list[torch.Tensor] = []
    for module in policy.model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda *given: chosen.append(given[2][2].sort(-1).values.cpu()))
    differences: dict[bool, list[np.ndarray]] = {False: [], True: []}
    missing, nbytes, device = 0, 0, next(model.parameters()).device
    equal: dict[str, list[bool]] = {"prompts": [], "completions": []}
    for number, (request, drawn) in enumerate(zip(requests, groups, strict=True)):
        samples = with_texts(drawn, [""] * len(drawn), supports=False)
        plan.forget()
        claimed = []
        for place, (sample, of) in enumerate(zip(samples, drawn, strict=True)):
            claim = f"{number} {place}".encode()
            missing += of.routes is None
            if of.routes is not None:
                drawn_tokens = len(of.token_ids)
                plan.take(claim, of.routes.tobytes(), len(request.prompt_token_ids) + drawn_tokens - 1, drawn_tokens)
                nbytes += of.routes.nbytes
            claimed.append(dataclasses.replace(sample, routes=claim))
        batch = micro_batch([PackedRow(request.prompt_token_ids, tuple(claimed), tuple(range(len(claimed))))])
        routes_TLK = plan.routes_of(batch, device)
        chosen.clear()
        with_routes = policy(batch).policy_logprobs_N
        plan.forget()
        chosen.clear()
        live = policy(batch).policy_logprobs_N
        if routes_TLK is not None:
            recorded_TLK = routes_TLK.sort(-1).values.cpu()
            same_TL, is_known_T = (torch.stack(chosen, 1) == recorded_TLK).all(-1), recorded_TLK[:, 0, 0] >= 0
            is_prompt_T = torch.arange(len(same_TL)) < len(request.prompt_token_ids)
            equal["prompts"] += same_TL[is_known_T & is_prompt_T].flatten().tolist()
            equal["completions"] += same_TL[is_known_T & ~is_prompt_T].flatten().tolist()
        if number % 8 == 7:
            tell(f"{number + 1} of {len(requests)} groups are compared")
        for is_replayed, logprobs in ((True, with_routes), (False, live)):
            differences[is_replayed].append(logprobs.double().cpu().numpy() - batch.behavior_logprobs_N)
    kl = {key: float(np.mean(np.expm1(d) - d)) for key, d in ((k, np.concatenate(v)) for k, v in differences.items())}
    most = {key: float(np.abs(np.concatenate(value)).max()) for key, value in differences.items()}
    tokens = sum(len(each) for each in differences[True])
    return {
        "tokens": tokens, "missing_routes": missing, "same_experts": {part: float(np.mean(of)) for part, of in equal.items()},
        "kl_live": kl[False], "kl_replayed": kl[True], "kl_ratio": kl[True] / kl[False],
        "largest_live_nats": most[False], "largest_replayed_nats": most[True], "route_bytes_a_token": nbytes / tokens,
    }  # fmt: skip


def bus_ratio(tokens: int) -> float:
    """Return the bytes of a sample's entry with a claim by those without, for ``tokens`` of 4 characters each."""
    generator = np.random.default_rng(0)
    sample = Sample(
        generator.integers(0, 150_000, tokens).astype(np.int32), -generator.random(tokens).astype(np.float32),
        np.zeros((1, 2), np.int32), FinishReason.STOP, "word" * tokens,
    )  # fmt: skip
    holders = Holder("run-rollout-0", "10.0.0.1:40000"), Holder("run-rollout-1", "10.0.0.2:40000")
    claim = wire.encode(Claim(7, "0" * 64, 384 * tokens, holders))
    prompt = Prompt(GroupId(7), "problems.jsonl:7", Sampling(8, tokens, 1.0), sample=0)
    parts = (
        RolloutGroup(prompt, np.zeros(64, np.int32), (each,), "run-rollout-0", 0.0, 0.0)
        for each in (sample, dataclasses.replace(sample, routes=claim))
    )
    without, with_claim = (len(wire.encode(part)) for part in parts)
    return with_claim / without


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--rounds", type=int, default=4, help="of each of vLLM's engines")
    parser.add_argument("--cache-gb", type=float, default=4.0, help="of each of vLLM's engines on a GPU")
    parser.add_argument("--compile", action="store_true", help="let vLLM use torch.compile on a GPU")
    parser.add_argument("--out", type=Path, help="a file for benchmarks/results")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if given.engine == "vllm":
        from penstock.services.rollout.engines.vllm.start import start_server

        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        start_server()  # imports vLLM meanwhile
    model, started_s = build(given.size, device), time.perf_counter()
    parameters = sum(weight.numel() for weight in model.parameters())
    tell(f"a model of {parameters / 1e9:.2f}B weights is built on {device}")
    sampling = Sampling(samples=given.samples, max_new_tokens=given.new_tokens, temperature=1.0)
    ids = prompts(given.groups, given.prompt_tokens, model.config.vocab_size)
    requests = [GenerationRequest(own, sampling, seed) for seed, own in enumerate(ids)]
    rates: dict[str, Any] = {}
    if given.engine == "vllm":
        with tempfile.TemporaryDirectory(dir=_memory(3 * parameters)) as folder:
            by = by_vllm(model, requests, Path(folder), given.rounds, given.cache_gb, compiled=given.compile)
            groups, rates = asyncio.run(by)
    else:
        groups = by_transformers(model, requests, device)
    drawn_s = time.perf_counter() - started_s
    figures = compare(model, requests[:_COMPARED], groups[:_COMPARED])
    shown = {"benchmark": "router_replay", "engine": given.engine, "device": device, "size": given.size}
    shown |= {"parameters": parameters, **figures, **rates, "bus_ratio_1024": bus_ratio(1024), "drawn_s": drawn_s}
    record.write(given.out, __doc__.splitlines()[0], shown)
    sys.exit(bool(figures["missing_routes"]) or not figures["kl_ratio"] <= MOST)


def _memory(nbytes: int) -> str | None:
    """Return a folder in the host's memory, if it has room."""
    shm = Path("/dev/shm")
    return str(shm) if shm.is_dir() and shutil.disk_usage(shm).free > nbytes else None


if __name__ == "__main__":
    main()
