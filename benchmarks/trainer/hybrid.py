"""Training time of a group with a long prompt in a model with recurrent layers.

    python -m benchmarks.trainer.hybrid                                                               # a toy, on a CPU
    python -m benchmarks.trainer.hybrid --device cuda --prompt 16384 --completion 128 --layers 12 --hidden 1536 --rounds 5

Three ways to the same logprobs and gradient, alternately::

    shared      the prompt once for all completions           trainer.packing = "rows"
    unshared    each sequence by itself, packed               the same, one row per sample
    sequences   each sequence by itself, by transformers      trainer.packing = "sequences"

``speedup``: the faster unshared way / shared. transformers chooses the recurrent kernels; they are reported. Logs go to
stderr.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from penstock.services.trainer.batch.packing import MicroBatch, PackedRow, micro_batch
from penstock.services.trainer.model.policy import Policy
from penstock.shared.bus.messages import FinishReason, Sample

LEAST_SPEEDUP = 4.0
"""For 16k prompt tokens and 8 completions of 128, on a GPU."""
_AGREE = {"cpu": (1e-4, 1e-3), "cuda": (5e-2, 5e-2)}
"""Largest difference of logprobs (nats) and relative one of gradient norms: float32; bfloat16."""
_KERNELS = ("fla", "mamba_ssm", "causal_conv1d")


def configure(arguments: argparse.Namespace) -> Any:
    """Return a configuration with attention in every fourth layer."""
    from transformers import BambaConfig, Lfm2Config, Qwen3_5TextConfig

    hidden, layers = arguments.hidden, arguments.layers
    heads = max(1, hidden // 128)
    attends = [number % 4 == 3 for number in range(layers)]
    sizes = {
        "vocab_size": arguments.vocabulary, "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4), "max_position_embeddings": 65_536,
    }  # fmt: skip
    if arguments.kind == "short_convolution":
        return Lfm2Config(**sizes, layer_types=["full_attention" if attention else "conv" for attention in attends])
    if arguments.kind == "mamba2":
        places = [number for number, attention in enumerate(attends) if attention]
        return BambaConfig(**sizes, attn_layer_indices=places, mamba_n_heads=2 * hidden // 64, mamba_d_head=64)
    linear = {"linear_num_key_heads": heads, "linear_num_value_heads": 2 * heads}
    kinds = ["full_attention" if attention else "linear_attention" for attention in attends]
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [11, 11, 10]}
    return Qwen3_5TextConfig(**sizes, head_dim=128, layer_types=kinds, rope_parameters=rope, **linear)


def build(arguments: argparse.Namespace) -> Policy:
    """Return a policy with random weights on the device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    with torch.device(arguments.device):
        model = AutoModelForCausalLM.from_config(configure(arguments), dtype=dtype, attn_implementation="sdpa")
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Policy(model, packing="rows", chunk_tokens=2048).train()


def group(arguments: argparse.Namespace) -> PackedRow:
    """Return one group of random tokens."""
    random = np.random.default_rng(0)
    ids = [
        random.integers(3, arguments.vocabulary, n).astype(np.int32) for n in [arguments.completion] * arguments.samples
    ]
    samples = tuple(
        Sample(completion, np.zeros(len(completion), np.float32), np.zeros((1, 2), np.int32), FinishReason.LENGTH, "")
        for completion in ids
    )
    prompt = random.integers(3, arguments.vocabulary, arguments.prompt).astype(np.int32)
    return PackedRow(prompt, samples, tuple(range(arguments.samples)))


def ways(row: PackedRow) -> dict[str, list[MicroBatch]]:
    """Return each way's micro-batches."""
    alone = [PackedRow(row.prompt_token_ids, (sample,), (place,)) for place, sample in enumerate(row.samples)]
    each = [micro_batch([sample]) for sample in alone]
    return {"shared": [micro_batch([row])], "unshared": each, "sequences": each}


def step(policy: Policy, batches: list[MicroBatch], tokens: int) -> tuple[float, float]:
    """Return the mean logprob and its gradient norm."""
    policy.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        mean = policy(batch).policy_logprobs_N.sum() / tokens
        mean.backward()
        total += float(mean.detach())
    gradients = [parameter.grad.float().norm() for parameter in policy.parameters() if parameter.grad is not None]
    return total, float(torch.stack(gradients).norm())


def measure(policy: Policy, way: str, batches: list[MicroBatch], tokens: int) -> dict[str, float]:
    """Return seconds, peak memory (bytes; 0 on a CPU), mean logprob and gradient norm."""
    policy.trunk.use("sequences" if way == "sequences" else "rows")
    cuda = next(policy.parameters()).is_cuda
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started_s = time.perf_counter()
    logprob, norm = step(policy, batches, tokens)  # reading numbers synchronizes the GPU
    seconds = time.perf_counter() - started_s
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return {"seconds": seconds, "peak_memory_bytes": float(peak), "logprob": logprob, "grad_norm": norm}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time all ways alternately."""
    policy, row = build(arguments), group(arguments)
    tokens = arguments.samples * arguments.completion
    passes = ways(row)
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in passes}
    for number in range(arguments.rounds + 1):  # the first compiles kernels and is not counted
        for way, batches in passes.items():
            measured = measure(policy, way, batches, tokens)
            seen[way] += [measured] if number else []
            print(
                f"round {number} of {arguments.rounds}, {way}: {measured['seconds']:.2f} s", file=sys.stderr, flush=True
            )
    gap = _gap(seen, arguments.device)
    medians = {
        way: {
            "seconds": statistics.median(measured["seconds"] for measured in of),
            "peak_memory_bytes": max(measured["peak_memory_bytes"] for measured in of),
            "computed_tokens": sum(batch.tokens for batch in passes[way]),
        }
        for way, of in seen.items()
    }
    speedup = min(medians["unshared"]["seconds"], medians["sequences"]["seconds"]) / medians["shared"]["seconds"]
    return {
        "speedup": speedup,
        "bar_met": speedup >= LEAST_SPEEDUP,
        "ways": medians,
        **gap,
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "kernels": [name for name in _KERNELS if importlib.util.find_spec(name)],
        **vars(arguments),
        "device_name": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def _gap(seen: dict[str, list[dict[str, float]]], device: str) -> dict[str, float]:
    logprobs, norms = (
        [measured[figure] for rounds in seen.values() for measured in rounds] for figure in ("logprob", "grad_norm")
    )
    gaps = max(logprobs) - min(logprobs), (max(norms) - min(norms)) / min(norms)
    if not all(gap <= most for gap, most in zip(gaps, _AGREE[device], strict=True)):  # also catches NaN
        raise SystemExit(f"the ways do not agree: {seen}")
    return {"logprob_gap_nats": gaps[0], "relative_grad_norm_gap": gaps[1]}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("gated_delta_net", "mamba2", "short_convolution"), default="gated_delta_net")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--completion", type=int, default=32, help="tokens of each completion")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    print(json.dumps(run(_parse())))
