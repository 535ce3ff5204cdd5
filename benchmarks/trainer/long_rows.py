"""Rows of one long sample with the inputs of layers in the host's memory, and with all on the GPU.

    python -m benchmarks.trainer.long_rows --out results.json                                 # 7B, 131,072 tokens, one GPU
    python -m benchmarks.trainer.long_rows --shape tiny --tokens 2048 --layers 8              # on a CPU: gradients alone

Parts, each tried as long as ``--limit-s`` allows, in this order:

    equal      gradients of a row of ``--equal`` tokens without and with, bit for bit; ``again``: without, twice
    pinned     seconds in which the host's memory is pinned, once
    pass       seconds and peak of a forward and backward pass over one sample of ``--tokens`` and of an eighth, both ways
    longest    tokens at which the pass's peak would be the usable share of the GPU, by the line through both peaks
    mixed      a step of ``--count`` samples of ``--mixed`` tokens in passes of 16,384, and one with the long sample, whose
               pass is the one above, beside short ones in passes of as many tokens (``beside``)

Weights are random. ``plan``: the peak that `penstock plan` has for such a pass, without CUDA's context.
"""

import argparse
import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.shapes import SHAPES
from benchmarks.trainer.models import random_model
from penstock.services.plan.hardware import GIB
from penstock.services.plan.layouts import USABLE
from penstock.services.plan.memory import TrainerOptions, total, trainer_table
from penstock.services.plan.shapes import from_config
from penstock.services.plan.workload import Lengths, Workload
from penstock.services.trainer.batch.assignment import plan
from penstock.services.trainer.batch.packing import MicroBatch, PackedRow
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.layers import kernels
from penstock.services.trainer.model.memory import offloading
from penstock.services.trainer.model.memory.recomputation import Recomputation
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.rank_group import start_ranks
from penstock.shared.bus.messages import FinishReason, Sample
from penstock.shared.errors import is_out_of_memory
from penstock.shared.model.flops import BACKWARD, forward_flops
from penstock.shared.settings import Settings

WAYS: Mapping[str, float] = {"on the GPU": math.inf, "offloaded": 0.0}
_PROMPT, _GROUP, _CAP = 64, 8, 16_384
_LONGER = 24
"""Times the seconds of eight times as many tokens, of which attention takes up to 64 times."""
Figures = dict[str, Any]


class Rows:
    """One engine, and the rows that it computes."""

    def __init__(self, arguments: argparse.Namespace, device: str, folder: Path) -> None:
        self.shape = {**SHAPES[arguments.shape], "num_hidden_layers": arguments.layers or SHAPES[arguments.shape]["num_hidden_layers"]}  # fmt: skip
        self.device, self._optimizer = device, arguments.optimizer
        settings = Settings.model_validate(
            {
                "run": {"device": device, "id": "long-rows", "folder": str(folder)},
                "policy": {"dtype": "bfloat16" if device == "cuda" else "float32"},
                "trainer": {
                    "zero_stage": 1, "optimizer": arguments.optimizer, "micro_batch_tokens": arguments.tokens,
                    "gradient_checkpointing": True,
                },
            }
        )  # fmt: skip
        model = random_model(self.shape, settings, device)
        policy = Policy(
            model,
            chunk_tokens=settings.internal.logits_chunk_tokens,
            fused_logits=kernels.fuses_logits(settings.trainer.kernels),
        ).train()
        self.engine = TrainingEngine(policy, settings, device)
        self.inputs = self.engine._recomputation.inputs
        self._lot = np.random.default_rng(0)

    def row(self, tokens: int, samples: int = 1) -> PackedRow:
        """Return a group whose samples have ``tokens`` each, with the prompt."""
        return PackedRow(self._ids(_PROMPT), tuple(self._sample(tokens - _PROMPT) for _ in range(samples)), tuple(range(samples)))  # fmt: skip

    def _sample(self, tokens: int) -> Sample:
        logprobs, versions = np.zeros(tokens, np.float32), np.zeros((1, 2), np.int32)
        return Sample(self._ids(tokens), logprobs, versions, FinishReason.STOP, "")

    def _ids(self, tokens: int) -> Any:
        return self._lot.integers(0, self.shape["vocab_size"], tokens).astype(np.int32)

    def batches(self, rows: Sequence[PackedRow], cap: int) -> list[MicroBatch]:
        """Return the passes of ``rows``."""
        return plan(rows, cap, 1, sizes=self.engine.sizes)[0]

    def compute(self, batches: Sequence[MicroBatch], *, step: bool = True) -> Figures:
        """Return seconds, peak and rate of the passes of a step."""
        self._synchronize()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started_s, before = time.monotonic(), self._allocated()
        for number, batch in enumerate(batches, 1):
            logprobs = self.engine.forward(batch).policy_logprobs_N
            self.engine.backward(logprobs.sum() / 1e5, last=number == len(batches))
            del logprobs
        self._synchronize()
        seconds = time.monotonic() - started_s
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
        if step:
            self.engine.step(1e-9)
        tokens = sum(batch.tokens for batch in batches)
        flops = sum(self._flops(batch) for batch in batches)
        return {
            "tokens": tokens, "passes": len(batches), "seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds, 1),
            "model_tflops_per_s": round(flops / seconds / 1e12, 1), "peak_bytes": peak, "before_bytes": before,
            "host_bytes": self._pinned(),
        }  # fmt: skip

    def _flops(self, batch: MicroBatch) -> float:
        pairs = int((batch.segments.positions.astype(np.int64) + 1).sum())
        return (1 + BACKWARD) * forward_flops(batch.tokens, pairs, len(batch.targets_N), self.engine.sizes)

    def gradients(self, batch: MicroBatch) -> list[torch.Tensor]:
        """Return the gradients of a pass, by hand, as the engine reduces its own."""
        self.engine.policy.zero_grad()
        recomputation = self.engine._recomputation
        with recomputation.watching(batch.tokens):
            logprobs = self.engine.policy(batch).policy_logprobs_N
        weights = [weight for weight in self.engine.policy.parameters() if weight.requires_grad]
        return list(torch.autograd.grad(logprobs.sum() / 1e3, weights))

    def planned(self, tokens: int, way: str) -> int:
        """Return the plan's bytes of a forward and backward pass."""
        shape = from_config(self.shape, "made")
        work = Workload(
            shape=shape, weight_bytes=2 if self.device == "cuda" else 4, groups=1, group_size=1, prompt_tokens=_PROMPT,
            lengths=Lengths(tokens, tokens, 0.0), max_lag=1, steps=2, passes=1.0, critic=None, reference=False, lora_rank=0,
        )  # fmt: skip
        gpu_bytes = 1.0 if way == "offloaded" else math.inf
        options = TrainerOptions(
            1, 1, self._optimizer, micro_batch_tokens=tokens, checkpointing=True, snapshots=0, gpu_bytes=gpu_bytes
        )
        table, _ = trainer_table(work, options, 140 * GIB)
        return round(total([part for part in table["forward and backward"] if part.name != "context"]))

    def keep_what_fits(self, cap: int) -> None:
        """Let layers keep activations as with ``trainer.gradient_checkpointing = "auto"`` and passes of ``cap`` tokens."""
        recomputation = Recomputation(self.engine.policy, cap, self.engine.device, sharded=False, automatic=True)
        recomputation.inputs._spare = self.inputs._spare
        self.engine._recomputation, self.inputs = recomputation, recomputation.inputs

    def pin(self, tokens: int) -> Figures:
        """Take the host's memory for a pass of ``tokens``, which the first such pass does otherwise."""
        started_s, layers = time.monotonic(), self.shape["num_hidden_layers"]
        nbytes = tokens * self.shape["hidden_size"] * (2 if self.device == "cuda" else 4)
        complete = self.inputs._add(layers * -(-nbytes // offloading._CHUNK_BYTES) - len(self.inputs._spare))
        seconds = time.monotonic() - started_s
        return {"bytes": self._pinned(), "seconds": round(seconds, 2), "complete": complete}

    def free(self) -> None:
        """Forget gradients and what torch keeps."""
        self.inputs.begin()
        self.engine.policy.zero_grad()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0

    def _pinned(self) -> int:
        return int(torch.cuda.host_memory_stats()["allocated_bytes.current"]) if self.device == "cuda" else 0


def equal(rows: Rows, tokens: int) -> Figures:
    (batch,) = rows.batches([rows.row(tokens)], tokens)
    of = {name: [] for name in ("on the GPU", "offloaded", "again")}  # type: dict[str, list[torch.Tensor]]
    for name in of:
        rows.inputs.least_bytes = WAYS.get(name, math.inf)
        of[name] = [gradient.cpu() for gradient in rows.gradients(batch)]
    first = of["on the GPU"]
    return {
        name: {
            "bitwise": all(map(torch.equal, first, of[name])),
            "largest": max(float((own - other).abs().max()) for own, other in zip(first, of[name], strict=True)),
        }
        for name in ("offloaded", "again")
    }


def one_pass(rows: Rows, tokens: int, way: str) -> Figures:
    rows.free()
    rows.inputs.least_bytes = WAYS[way]
    planned = {"plan_bytes": rows.planned(tokens, way)}
    (batch,) = rows.batches([rows.row(tokens)], tokens)
    try:
        return {**rows.compute([batch]), **planned}
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"out_of_memory": str(error).splitlines()[0][:200], **planned}


def longest(short: Figures, long: Figures, usable_bytes: float) -> int:
    """Return the tokens of a pass whose peak is ``usable_bytes``; ``long`` may not have fitted."""
    slope: float = (long["peak_bytes"] - short["peak_bytes"]) / (long["tokens"] - short["tokens"])
    return int(short["tokens"] + (usable_bytes - short["peak_bytes"]) / slope)


def mixed(rows: Rows, long: Figures, short: int, count: int) -> Figures:
    """Return a step of ``count`` short samples, and one with the long sample whose pass ``long`` is of."""
    others, figures = [rows.row(short, _GROUP) for _ in range(count // _GROUP)], Figures()
    for name, cap, steps in (("without", _CAP, 3), ("beside", max(long["tokens"] + 1, _CAP), 1)):
        rows.free()
        rows.keep_what_fits(cap)
        batches = rows.batches(others, cap)
        for _ in range(steps):  # each decides for the next one
            kept = rows.engine.kept.layers
            figures[name] = {**rows.compute(batches), "kept_layers": kept}
    both = (figures["beside"], long)
    seconds = sum(of["seconds"] for of in both)
    figures["with"] = {
        "tokens_per_s": round(sum(of["tokens"] for of in both) / seconds, 1),
        "model_tflops_per_s": round(sum(of["model_tflops_per_s"] * of["seconds"] for of in both) / seconds, 1),
    }
    figures |= {
        f"ratio of {name}": round(with_long / max(1e-9, figures["without"][name]), 3)
        for name, with_long in figures["with"].items()
    }
    return figures


def measured(arguments: argparse.Namespace, shown: Figures, keep: Callable[[], None]) -> None:
    """Fill ``shown``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started_s = time.monotonic()
    start_ranks(device)

    def has_time(seconds: float) -> bool:
        return bool(time.monotonic() - started_s + seconds < arguments.limit_s)

    def tell(name: str, value: Any) -> None:
        shown[name] = value
        print(f"{time.monotonic() - started_s:7.1f} s  {name}: {json.dumps(value)}", flush=True)
        keep()

    with tempfile.TemporaryDirectory(prefix="penstock-long-rows-") as folder:
        rows = Rows(arguments, device, Path(folder))
        tell("device", torch.cuda.get_device_name() if device == "cuda" else "cpu")
        tell("warm up", rows.compute(rows.batches([rows.row(2048)], 2048)))
        if arguments.equal:
            tell("equal", equal(rows, arguments.equal))
        tell("pinned", rows.pin(arguments.tokens))
        capacity = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0
        lengths = (arguments.tokens // 8, arguments.tokens)
        of: dict[str, list[Figures]] = {way: [] for way in WAYS}
        expected_s = 0.0
        for tokens in lengths:
            for way in ("offloaded", "on the GPU"):
                if has_time(expected_s):
                    of[way].append(one_pass(rows, tokens, way))
                    tell(f"pass of {tokens:,} {way}", of[way][-1])
                    expected_s = 1.1 * of[way][-1].get("seconds", 0.0)
            expected_s *= _LONGER
        for way, (short, *long) in of.items():
            if long and "peak_bytes" in long[0] and capacity:
                tell(f"longest {way}", longest(short, long[0], USABLE * capacity))
        if arguments.mixed and len(of["offloaded"]) > 1 and has_time(arguments.mixed_s):
            tell("mixed", mixed(rows, of["offloaded"][1], arguments.mixed, arguments.count))
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int, default=0, help="0: the shape's")
    parser.add_argument("--optimizer", choices=("adamw", "adamw_8bit"), default="adamw_8bit")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--equal", type=int, default=0, help="tokens of the row whose gradients are compared; 0: none")
    parser.add_argument("--mixed", type=int, default=0, help="tokens of a short sample of the mixed batch; 0: none")
    parser.add_argument("--count", type=int, default=96, help="short samples of the mixed batch")
    parser.add_argument("--mixed-s", type=float, default=60.0, help="seconds that the mixed batch may need")
    parser.add_argument("--limit-s", type=float, default=math.inf)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = ("shape", "layers", "optimizer", "tokens")
    shown: Figures = {"benchmark": "long_rows", **{name: getattr(arguments, name) for name in names}, "versions": {"torch": torch.__version__}}  # fmt: skip

    def keep() -> None:
        if arguments.out:
            arguments.out.write_text(json.dumps(shown, indent=1) + "\n")

    try:
        measured(arguments, shown, keep)
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        shown["failed"] = traceback.format_exc().splitlines()[-1]
        keep()
        raise
    finally:
        print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
