"""Tokens per second, utilization and memory of a training step, packed and padded.

    python -m benchmarks.trainer.step                                                              # a toy, one CPU
    python -m benchmarks.trainer.step --shape 0.5b --device cuda
    python -m benchmarks.trainer.step --shape 7b --device cuda --ranks 2 --zero-stage 3
    python -m benchmarks.trainer.step --shape 30b-a3b --layers 8 --device cuda --ranks 2 --expert-parallel 2 --ways packed \\
        --against '{"zero_stage": 3, "expert_parallel": 1}' --cap 8192 --groups 16 --gradient-checkpointing false --warm-ups 2
    python -m benchmarks.trainer.step --shape 1.5b --device cuda --ranks 2 --sequence-parallel 2 --each 32640 --cap 16512 --ways packed
    python -m benchmarks.trainer.step --shape 7b --device cuda --ranks 2 --sequence-parallel 2 --each 131008 --cap 65600 --ways packed \\
        --groups 1 --gradient-checkpointing true --warm-ups 0 --rounds 1                           # a pass a completion
    python -m benchmarks.trainer.step --shape 0.5b --device cuda --ranks 2 --sequence-parallel 2 --memory-gb 24 --ways packed

Three ways to the same mean logprob and gradient, which must agree::

    packed   rows end to end, prompts shared, as the trainer does       (services/trainer/batch/packing.py)
    padded   separate sequences in order of arrival, padded to the longest
    sorted   separate sequences by length, padded likewise

Padding on the right needs no mask. Lengths are as in ``benchmarks.trainer.packing``, or with ``--each`` all the same;
samples are the same in each round, so that sizes repeat, which they do not in training, but with ``--fresh``. With
``--memory-gb`` the ``longest`` sample is sought that makes a step in so much of each GPU. With ``--against`` the same
samples are packed for a second engine, too, with the same weights and other settings of the trainer, which makes its steps in turn:
``against_ratio`` is its seconds by the first one's, and memory includes the states of both. Weights are random. ``tokens_per_s``
counts trained tokens; ``mfu`` the packed step's model operations without recomputation. Memory is the largest rank's:
torch's allocator on a GPU, resident on a CPU. Logs go to stderr.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import record
from benchmarks.record import tell
from benchmarks.shapes import ALL_SHAPES
from benchmarks.trainer.models import EitherPolicy, Padded, by_arrival, by_length, random_model
from benchmarks.trainer.packing import equal, mix
from penstock.services.trainer.batch.assignment import plan
from penstock.services.trainer.batch.packing import MicroBatch, PackedRow
from penstock.services.trainer.launcher import launch
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.layers import attention, kernels, ulysses
from penstock.services.trainer.phases import Phases, utilisation
from penstock.services.trainer.rank_group import start_ranks
from penstock.shared.model.flops import BACKWARD, ModelSizes
from penstock.shared.settings import Settings, TrainerSettings

LEAST_RATIO, LEAST_MFU = 1.3, {"tiny": 0.0, "0.5b": 0.45, "7b": 0.5}
"""Limits: packed / padded; bfloat16 utilization on GPUs."""
_AGREE = {"logprob": {"float32": 1e-5, "bfloat16": 2e-3}, "grad_norm": {"float32": 1e-4, "bfloat16": 2e-2}}
"""Largest relative differences."""
WAYS, AGAINST = ("packed", "padded", "sorted"), "against"
_LONG = 32_768
"""Positions of a pass that is logged by itself."""

Batches = Sequence[MicroBatch | Padded]
Passes = Mapping[str, tuple[TrainingEngine, Batches]]
"""By way."""


def settings(arguments: argparse.Namespace, more: Mapping[str, Any]) -> Settings:
    """Return the run's settings, with ``more`` of the trainer's."""
    return Settings.model_validate(
        {
            "run": {"device": arguments.device},
            "policy": {"dtype": "bfloat16" if arguments.device == "cuda" else "float32"},
            "trainer": {
                "ranks": arguments.ranks, "zero_stage": arguments.zero_stage,
                "sequence_parallel": arguments.sequence_parallel, "expert_parallel": arguments.expert_parallel,
                "learning_rate": 0.0, "micro_batch_tokens": arguments.cap, "optimizer": arguments.optimizer,
                "kernels": arguments.kernels, "gradient_checkpointing": arguments.gradient_checkpointing, "offload": arguments.offload,
                "deepspeed": json.loads(arguments.deepspeed), **more,
            },
            "internal": {"peak_tflops": arguments.peak_tflops, "attention": arguments.attention},
        }
    )  # fmt: skip


def built(arguments: argparse.Namespace, of: Settings) -> TrainingEngine:
    """Return an engine with random weights."""
    if of.trainer.sequence_parallel > 1:
        ulysses.group_of(of.trainer.sequence_parallel)
    torch.manual_seed(0)
    changes = {"num_hidden_layers": arguments.layers} if arguments.layers else {}
    model = random_model({**ALL_SHAPES[arguments.shape], **changes}, of, arguments.device)
    tell("the model is built")
    fused = kernels.fuses_logits(of.trainer.kernels)
    kind = attention.kind_of(of.internal.attention, of.trainer.kernels)
    policy = EitherPolicy(model, kind=kind, chunk_tokens=of.internal.logits_chunk_tokens, fused_logits=fused).train()
    engine = TrainingEngine(policy, of, arguments.device)
    tell("the engine is built")
    return engine


def packed(rows: Sequence[PackedRow], of: Settings, sizes: ModelSizes) -> Batches:
    """Return this rank's packed batches."""
    cap, together = of.trainer.micro_batch_tokens, of.trainer.sequence_parallel
    return plan(rows, cap, of.trainer.ranks, sizes=sizes, sequence_parallel=together)[dist.get_rank()]


def ways(rows: Sequence[PackedRow], arguments: argparse.Namespace, of: Settings, engine: TrainingEngine) -> Passes:
    """Return this rank's batches by each way."""
    rank, ranks, cap = dist.get_rank(), arguments.ranks, arguments.cap
    makers: dict[str, Callable[[], Batches]] = {
        "packed": lambda: packed(rows, of, engine.sizes),
        "padded": lambda: by_arrival(rows, cap, rank, ranks),
        "sorted": lambda: by_length(rows, cap, rank, ranks),
    }
    return {way: (engine, make()) for way, make in makers.items() if way in arguments.ways}


def step(engine: TrainingEngine, batches: Batches, tokens: int) -> tuple[float, float]:
    """Make one step; return this rank's part of the mean logprob, and the gradient norm."""
    total, began_s = torch.zeros((), device=engine.device), time.perf_counter()
    for number, batch in enumerate(batches, start=1):
        mean = engine.forward(batch).policy_logprobs_N.sum() / tokens
        engine.backward(-mean * engine.ranks, last=number == len(batches))
        total += mean.detach()
        if batch.tokens > _LONG:
            tell(f"pass {number} of {len(batches)}: {float(total):.4f} nats, {time.perf_counter() - began_s:.1f} s")
    norm = engine.step(0.0)
    return float(total), norm


def measure(engine: TrainingEngine, phases: Phases, make: Callable[[], tuple[float, float]]) -> dict[str, float]:
    """Return a step's seconds and peak bytes over all ranks, mean logprob and gradient norm."""
    dist.barrier()
    phases.take_memory()
    started_s = time.perf_counter()
    with phases.measure("step"):
        logprob, norm = make()  # reading numbers synchronizes the GPU
    seconds, memory = time.perf_counter() - started_s, phases.take_memory()["memory_step_bytes"]
    largest = torch.tensor([seconds, memory], dtype=torch.float64, device=engine.device)
    total = torch.tensor(logprob, dtype=torch.float64, device=engine.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return {"seconds": float(largest[0]), "bytes": float(largest[1]), "logprob": float(total), "grad_norm": norm}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every way's step alternately."""
    of = settings(arguments, {})
    start_ranks(arguments.device)
    tell(f"{arguments.ranks} ranks on {arguments.device}, building {arguments.shape}")
    engine = built(arguments, of)
    if arguments.memory_gb:
        longest = longest_of(engine, arguments, engine.sizes)
        return {"longest": longest, **vars(arguments), "out": str(arguments.out), "torch": torch.__version__}
    other = settings(arguments, json.loads(arguments.against)) if arguments.against else None
    against = built(arguments, other) if other else None
    phases, seen, passes = Phases(engine.device), defaultdict[str, list[dict[str, float]]](list), dict[str, Any]()
    for number in range(arguments.warm_ups + arguments.rounds):  # warm-up: shapes and memory planning
        if not passes or arguments.fresh:
            rows = rows_of(arguments, engine.vocabulary, number)
            passes = dict(ways(rows, arguments, of, engine))
            if against is not None and other is not None:
                passes[AGAINST] = against, packed(rows, other, engine.sizes)
            tokens = sum(len(sample.token_ids) for row in rows for sample in row.samples)
            flops = sum(row.flops(engine.sizes) for row in rows) * (1 + BACKWARD) / engine.ranks
            counts = {way: len(batches) for way, (_, batches) in passes.items()}
            tell(f"{tokens} trained tokens; forward passes a rank: {counts}")
        for way, (by, batches) in passes.items():
            measured = measure(by, phases, functools.partial(step, by, batches, tokens))
            if number >= arguments.warm_ups:
                computed = sum(batch.tokens for batch in batches)
                seen[way].append({**measured, "tokens": tokens, "flops": flops, "computed": computed})
            tell(f"round {number}, {way}: {measured['seconds']:.2f} s, {measured['bytes'] / 1e9:.1f} GB; {by.kept}")
    _check(seen, of)
    return _figures(seen, passes, arguments)


def rows_of(arguments: argparse.Namespace, vocabulary: int, seed: int = 0) -> list[PackedRow]:
    """Return the groups: of random lengths, or all samples of ``--each`` tokens."""
    if arguments.each:
        return equal(arguments.groups, arguments.samples, arguments.each, vocabulary)
    longest = arguments.longest
    return mix(arguments.groups, arguments.samples, longest, seed, median=longest // 7, vocabulary=vocabulary)


def longest_of(engine: TrainingEngine, arguments: argparse.Namespace, sizes: ModelSizes) -> int:
    """Return the tokens of the longest sample that makes a step in ``--memory-gb`` of each GPU, within 3 %.

    Each rank, or group of ranks that compute a sample together, has one.
    """
    share = arguments.memory_gb * 1e9 / torch.cuda.get_device_properties(engine.device).total_memory
    torch.cuda.set_per_process_memory_fraction(share, engine.device)
    together = arguments.sequence_parallel
    fits, misses = 0, 0
    while not misses or misses > 1.03 * fits:
        tokens = (fits + misses) // 2 if misses else 2 * fits or 8192
        rows = equal(engine.ranks // together, 1, tokens, engine.vocabulary)
        batches = plan(rows, -(-(tokens + 256) // together), engine.ranks, sizes=sizes, sequence_parallel=together)
        failed = torch.zeros((), device=engine.device)
        try:
            step(engine, batches[dist.get_rank()], tokens * len(rows))
        except torch.OutOfMemoryError:
            failed += 1
            torch.cuda.empty_cache()
        dist.all_reduce(failed)
        fits, misses = (fits, tokens) if failed else (tokens, misses)
        tell(f"{tokens} tokens: {'no' if failed else 'yes'}")
    return fits


def _check(seen: Mapping[str, list[dict[str, float]]], of: Settings) -> None:
    for figure, tolerance in _AGREE.items():
        for of_round in zip(*seen.values(), strict=True):
            values = [measured[figure] for measured in of_round]
            if not max(values) - min(values) <= tolerance[of.policy.dtype] * abs(min(values)):  # also catches NaN
                raise SystemExit(f"expected the same {figure} by every way, found {seen}")


def _figures(
    seen: Mapping[str, list[dict[str, float]]], passes: Passes, arguments: argparse.Namespace
) -> dict[str, Any]:
    engine = passes["packed"][0]
    computed = torch.tensor([of_way[-1]["computed"] for of_way in seen.values()], device=engine.device)
    dist.all_reduce(computed)
    medians: dict[str, dict[str, Any]] = {}
    for (way, of_way), positions in zip(seen.items(), computed.tolist(), strict=True):
        reached = [utilisation(each["flops"], each["seconds"], arguments.peak_tflops, engine.device) for each in of_way]
        medians[way] = {
            "seconds": statistics.median(each["seconds"] for each in of_way),
            "tokens_per_s": statistics.median(each["tokens"] / each["seconds"] for each in of_way),
            "computed_tokens": int(positions), "peak_memory_bytes": max(each["bytes"] for each in of_way),
            **{name: statistics.median(each[name] for each in reached) for name in reached[0]},
            "rounds_s": [each["seconds"] for each in of_way], "kept": dataclasses.asdict(passes[way][0].kept),
            "mean_logprob": of_way[-1]["logprob"], "grad_norm": of_way[-1]["grad_norm"],
        }  # fmt: skip
    packed, mfu = medians["packed"], medians["packed"].get("mfu")
    ratios = {way: median["seconds"] / packed["seconds"] for way, median in medians.items()}
    return {
        "mfu": mfu,
        "tokens_per_s": packed["tokens_per_s"],
        "peak_memory_bytes": packed["peak_memory_bytes"],
        "padding_ratio": ratios.get("padded"),
        "sorted_padding_ratio": ratios.get("sorted"),
        "against_ratio": ratios.get(AGAINST),
        "bars_met": ratios.get("padded", LEAST_RATIO) >= LEAST_RATIO
        and (mfu or 1.0) >= LEAST_MFU.get(arguments.shape, 0.0),
        "trained_tokens": seen["packed"][-1]["tokens"],
        "ways": medians,
        **{name: value for name, value in vars(arguments).items() if name not in ("peak_tflops", "ways", "out")},
        "device_name": torch.cuda.get_device_name() if engine.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(ALL_SHAPES), default="tiny")
    parser.add_argument("--layers", type=int, default=0, help="instead of the shape's")
    parser.add_argument("--sequence-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--each", type=int, default=0, help="tokens of every completion, after a prompt of 64")
    parser.add_argument("--memory-gb", type=float, default=0.0, help="of each GPU, in which to find the longest sample")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), default=1)
    parser.add_argument("--gradient-checkpointing", choices=("auto", "true", "false"), default="auto")
    parser.add_argument("--kernels", choices=("auto", "torch", "liger"), default="auto")
    parser.add_argument("--attention", choices=("auto", "mask", "varlen", "flash4"), default="auto")
    parser.add_argument("--optimizer", choices=("adamw", "adamw_8bit"), default="adamw")
    parser.add_argument("--offload", choices=("none", "optimizer", "all"), default="none")
    parser.add_argument("--deepspeed", default="{}", help="more of DeepSpeed's settings, as JSON")
    parser.add_argument("--against", help="settings of the trainer of a second engine, as JSON")
    parser.add_argument("--cap", type=int, help="most positions of a forward pass")
    parser.add_argument("--longest", type=int, help="tokens of the longest sequence; a quarter of the cap otherwise")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="packed is needed")
    parser.add_argument("--warm-ups", type=int, default=4, help="rounds before those that count")
    parser.add_argument("--groups", type=int)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="other samples in each round, as in training")
    parser.add_argument("--out", type=Path, help="a file for benchmarks/results")
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="of one device; 0: by a GPU's name")
    arguments = parser.parse_args()
    toy = arguments.shape.startswith("tiny")
    arguments.cap, arguments.groups = (
        arguments.cap or (1024 if toy else 16_384),
        arguments.groups or (16 if toy else 16 * arguments.ranks),
    )
    arguments.longest = arguments.longest or arguments.cap // 4
    if arguments.device == "cuda" and torch.cuda.device_count() < arguments.ranks:
        raise SystemExit(
            f"expected {arguments.ranks} GPUs, found {torch.cuda.device_count()}: change --ranks or --device"
        )
    if arguments.groups * arguments.samples % arguments.ranks:
        raise SystemExit("expected groups × samples to be a multiple of --ranks: change --groups")
    return arguments


def main() -> None:
    """Launch the ranks, measure, and print."""
    arguments = _parse()
    if arguments.ranks > 1 and "RANK" not in os.environ:
        command = [sys.executable, "-m", "benchmarks.trainer.step", *sys.argv[1:]]
        sys.exit(launch(command, TrainerSettings(ranks=arguments.ranks), drain_s=0.0))
    warnings.simplefilter("ignore")
    result = run(arguments)
    if dist.get_rank() == 0:
        record.write(arguments.out, f"Training steps of the shape {arguments.shape}, random weights", result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
