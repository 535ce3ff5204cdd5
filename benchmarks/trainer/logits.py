"""Memory and time of logprobs and entropies: all logits at once, and in chunks.

    python -m benchmarks.trainer.logits --vocabulary 152064 --tokens 16384 --hidden 256
    python -m benchmarks.trainer.logits --top-k 8        also the logprobs of 8 tokens a position, and of all others together

    plain            all logits at once, by torch
    chunked          as the trainer: in chunks, on a GPU by one kernel
    chunked_unfused  on a GPU: in chunks, by torch

Each way runs in its own process: float32 on a CPU, bfloat16 on a GPU (``--device cuda``). Memory is the peak beyond the
inputs. Plain needs 40 GB for 16,384 tokens; ``--tokens 4096 --chunk 512 --hidden 64`` 11 GB. Fails below a ratio of 4.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import psutil
import torch
from torch import Tensor, nn

from penstock.services.trainer.model.layers.logits import token_logprobs

LEAST_RATIO = 4.0


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Run one way; return its peak (bytes) and seconds."""
    fused, chunk_tokens = arguments.one == "chunked", 0 if arguments.one == "plain" else arguments.chunk
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    output = torch.nn.Linear(arguments.hidden, arguments.vocabulary, bias=False, device=device, dtype=dtype)
    hidden_ND = torch.randn(arguments.tokens, arguments.hidden, device=device, dtype=dtype, requires_grad=True)
    targets_N = torch.randint(0, arguments.vocabulary, (arguments.tokens,), device=device)
    # Warm up imports and compilation.
    numbers = torch.arange(arguments.tokens * arguments.top_k, device=device)
    tops = (numbers % arguments.vocabulary).view(-1, arguments.top_k) if arguments.top_k else None
    _compute(hidden_ND, output, targets_N, tops, min(chunk_tokens, 1), fused, arguments.entropy_gradient, most=2)
    output.zero_grad()
    hidden_ND.grad = None
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = psutil.Process().memory_info().rss
    started_s = time.perf_counter()
    _compute(hidden_ND, output, targets_N, tops, chunk_tokens, fused, arguments.entropy_gradient)
    if device.type == "cuda":
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"bytes": float(peak - before), "seconds": time.perf_counter() - started_s}


def _compute(
    hidden: Tensor,
    output: nn.Module,
    targets: Tensor,
    tops: Tensor | None,
    chunk_tokens: int,
    fused: bool,
    entropy_gradient: bool,
    most: int | None = None,
) -> None:
    targets, tops = targets[:most], None if tops is None else tops[:most]
    ones = torch.ones(len(targets), device=targets.device)
    out = token_logprobs(
        hidden[:most], output, targets, ones, chunk_tokens, entropy_gradient=entropy_gradient, fused=fused, tops_NK=tops
    )
    outputs = out.policy_logprobs_N.sum() + (out.entropy_N.sum() if entropy_gradient else 0.0)
    if out.top_logprobs_NK is not None and out.others_logprobs_N is not None:
        outputs = outputs + out.top_logprobs_NK.sum() + out.others_logprobs_N.sum()
    torch.autograd.backward(outputs)


def main() -> None:
    """Measure in separate processes, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--entropy-gradient", action="store_true")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--one", choices=("plain", "chunked", "chunked_unfused"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(measure(arguments)))
        return
    on_gpu = arguments.device != "cpu"
    ways = {way: _apart(way) for way in ("plain", "chunked", *(("chunked_unfused",) if on_gpu else ()))}
    plain, chunked = ways["plain"], ways["chunked"]
    ratio = plain["bytes"] / chunked["bytes"]
    result = {"memory_ratio": ratio, "time_ratio": plain["seconds"] / chunked["seconds"], "ways": ways}
    settings = ("vocabulary", "tokens", "hidden", "chunk", "device", "entropy_gradient", "top_k")
    print(json.dumps(result | {name: vars(arguments)[name] for name in settings}))
    sys.exit(ratio < LEAST_RATIO)


def _apart(way: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.trainer.logits", *sys.argv[1:], "--one", way]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    main()
