"""Peak memory of a training step on a GPU, predicted by the plan and measured: one configuration a call.

    python -m benchmarks.plan_memory --shape 7b --ranks 2 --zero-stage 3
    python -m benchmarks.plan_memory --shape 1.5b --zero-stage 1 --lora 16 --gradient-checkpointing

Runs ``benchmarks.trainer`` for a round, or a run of ``penstock up`` of two steps where an adapter or a critic is
trained, and prints one JSON object. The bar is a deviation of 7 %. Not run on a GPU yet.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.pipeline_work import ROOT, long
from services.plan.hardware import GPUS
from services.plan.memory import TrainerOptions, peak, trainer_table
from services.plan.shapes import shape_of
from services.plan.workload import Lengths, Workload

BAR = 0.07
_SHAPES = ("0.5b", "1.5b", "7b")


def predicted(arguments: argparse.Namespace) -> float:
    """Return the peak of rank 0's allocator; the context is not its own."""
    shape = shape_of(arguments.shape)
    work = Workload(
        shape=shape, weight_bytes=2, groups=32, group_size=8, prompt_tokens=64, lengths=Lengths(512, 512, 0.0),
        max_lag=1, steps=2, passes=1.0, critic=shape if arguments.critic else None, reference=False,
        lora_rank=arguments.lora,
    )  # fmt: skip
    options = TrainerOptions(
        arguments.ranks,
        arguments.zero_stage,
        micro_batch_tokens=arguments.cap,
        checkpointing=arguments.gradient_checkpointing,
        snapshots=_runs_whole(arguments),
    )
    table, _ = trainer_table(work, options, GPUS["H200"].memory_bytes)
    return peak(table) - next(part.nbytes for part in table["wait"] if part.name == "context")


def _runs_whole(arguments: argparse.Namespace) -> bool:
    return bool(arguments.lora or arguments.critic)


def measured(arguments: argparse.Namespace) -> float:
    """Return the peak of rank 0's allocator."""
    return _of_run(arguments) if _runs_whole(arguments) else _of_step(arguments)


def _of_step(arguments: argparse.Namespace) -> float:
    flags = ["--shape", arguments.shape, "--device", "cuda", "--rounds", "1", "--ranks", str(arguments.ranks)]
    flags += ["--zero-stage", str(arguments.zero_stage), "--cap", str(arguments.cap)]
    flags += ["--gradient-checkpointing", str(arguments.gradient_checkpointing).lower(), "--ways", "packed"]
    printed = _output([sys.executable, "-m", "benchmarks.trainer", *flags])
    return float(json.loads(printed.strip().splitlines()[-1])["peak_memory_bytes"])


def _of_run(arguments: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory(prefix="penstock-plan-memory-") as name:
        folder = Path(name)
        values: dict[str, Any] = long(folder, arguments.shape, "cuda", "auto").settings
        values["run"] |= {"id": "memory", "folder": name, "steps": 2}
        values["trainer"] |= {
            "zero_stage": arguments.zero_stage,
            "ranks": arguments.ranks,
            "gpus": list(range(arguments.ranks)),
            "micro_batch_tokens": arguments.cap,
            "gradient_checkpointing": arguments.gradient_checkpointing,
        }
        values["rollout"]["gpus"] = [arguments.ranks]
        values["policy"]["lora"] = {"rank": arguments.lora}
        values["algorithm"] |= {"preset": "ppo"} if arguments.critic else {}
        config = folder / "run.toml"
        config.write_text(tomli_w.dumps(values))
        _output([sys.executable, "-m", "services.cli", "up", str(config)])
        lines = (folder / "memory" / "metrics.jsonl").read_text().splitlines()
        return max(float(json.loads(line)["memory_bytes"]) for line in lines)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-3000:]}")
    return done.stdout


def main() -> None:
    """Run one configuration and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=_SHAPES, default="0.5b")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), default=1)
    parser.add_argument("--cap", type=int, default=16_384)
    parser.add_argument("--lora", type=int, default=0)
    parser.add_argument("--critic", action="store_true")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--predict-only", action="store_true", help="needs no GPU")
    arguments = parser.parse_args()
    expected = predicted(arguments)
    result: dict[str, Any] = {**vars(arguments), "predicted_bytes": round(expected)}
    if not arguments.predict_only:
        seen = measured(arguments)
        deviation = expected / seen - 1
        result |= {"measured_bytes": round(seen), "deviation": round(deviation, 4), "bar_met": abs(deviation) <= BAR}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
