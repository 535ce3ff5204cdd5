"""Logprob error of bfloat16 logits, and the cost of float32 logits.

    python -m benchmarks.logits_precision                                                     # a CPU: the error alone
    python -m benchmarks.logits_precision --device cuda --tokens 16384 --hidden 3584

Random bfloat16 inputs, with logits' standard deviation ``--spread``; exact logprobs use float64::

    model      the output layer in bfloat16: logits rounded to 8 bits
    float32    the same products, not rounded         (trainer.logits, shared/model/logits_projection.py)

``error``: mean and largest |logprob − exact|, nats, over ``--exact`` tokens. ``gap_<noise>``: difference from an engine
with bfloat16 logits (vLLM) whose hidden states differ by that relative noise; with little noise both round alike, so
float32 differs more. ``seconds``: median of ``--repeats``; ``bytes``: GPU peak.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from penstock.services.trainer.model.layers.logits import token_logprobs
from penstock.shared.model.logits_projection import LogitsType

KINDS: tuple[LogitsType, ...] = ("model", "float32")
NOISES = (0.0, 0.002, 0.01, 0.03)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return errors, gaps and times of both kinds."""
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    output, hidden = _layer(arguments, device)
    few = hidden[: arguments.exact]
    exact = torch.log_softmax(few.double() @ output.weight.detach().double().t(), dim=-1)
    targets = torch.multinomial(exact.exp().float(), 1).squeeze(1)
    exact = exact.gather(1, targets[:, None]).squeeze(1)
    engines = {noise: _logprobs(_moved(few, noise), output, targets, "model") for noise in NOISES}
    results: dict[str, Any] = {}
    for kind in KINDS:
        computed = _logprobs(few, output, targets, kind)
        results[kind] = {"error": _distances(computed, exact)}
        results[kind] |= {f"gap_{noise:g}": _distances(computed, engine) for noise, engine in engines.items()}
        results[kind] |= _cost(arguments, output, hidden, kind)
    return results


def _moved(hidden: Tensor, noise: float) -> Tensor:
    return (hidden.float() * (1 + noise * torch.randn_like(hidden, dtype=torch.float32))).bfloat16()


def _layer(arguments: argparse.Namespace, device: torch.device) -> tuple[nn.Linear, Tensor]:
    output = nn.Linear(arguments.hidden, arguments.vocabulary, bias=False, device=device, dtype=torch.bfloat16)
    nn.init.normal_(output.weight, std=arguments.spread / arguments.hidden**0.5)
    return output, torch.randn(arguments.tokens, arguments.hidden, device=device).bfloat16()


@torch.no_grad()
def _logprobs(hidden: Tensor, output: nn.Module, targets: Tensor, kind: LogitsType) -> Tensor:
    ones = torch.ones(len(targets), device=targets.device)
    return token_logprobs(hidden, output, targets, ones, kind=kind).policy_logprobs_N.double()


def _distances(computed: Tensor, expected: Tensor) -> dict[str, float]:
    distance = (computed - expected).abs()
    return {"mean": float(distance.mean()), "max": float(distance.max())}


def _cost(arguments: argparse.Namespace, output: nn.Module, hidden: Tensor, kind: LogitsType) -> dict[str, float]:
    on_gpu, seconds = hidden.is_cuda, []
    targets = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    ones = torch.ones(len(hidden), device=hidden.device)
    for number in range(arguments.repeats + 1):  # the first also compiles
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started_s = time.perf_counter()
        leaf = hidden.detach().requires_grad_()
        out = token_logprobs(leaf, output, targets, ones, arguments.chunk, kind=kind)
        torch.autograd.backward(out.policy_logprobs_N.sum())
        if on_gpu:
            torch.cuda.synchronize()
        if number:
            seconds.append(time.perf_counter() - started_s)
        output.zero_grad()
    memory = {"bytes": float(torch.cuda.max_memory_allocated())} if on_gpu else {}
    return {"seconds": statistics.median(seconds), **memory}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--exact", type=int, default=64, help="tokens whose exact logprobs are computed")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--spread", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments) | vars(arguments)))


if __name__ == "__main__":
    main()
