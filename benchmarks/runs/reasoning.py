r"""What a real pretrained model learns in minutes: examples/reasoning, two tasks, three seeds each.

    python examples/reasoning/prepare.py
    python -m benchmarks.runs.reasoning                                   # one GPU, one run after the other
    python -m benchmarks.runs.reasoning --together 6 --rollout.vllm.gpu_memory_utilization 0.1 \
        --rollout.vllm.arguments '{kv_cache_memory_bytes = 4000000000}'   # six runs share the GPU, under CUDA MPS

Other flags go to ``penstock up``. Of runs that share a GPU, the first two start alone, until their first step: the start
with the caches as they are, and that of a second run on the same host. ``ratio`` is held-out accuracy after over before
training (greedy, all held-out problems). Prints a JSON object for each run when it ends, then one for all; ``--out`` keeps
those lines and each run's records as they are made.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.pipeline import end, environment_with, heed_sigterm, steps_of
from benchmarks.runs.startup import ready_of

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "reasoning" / "one-gpu.toml"
TASKS = ("chain_sum", "simple_equations")
RECORDS = ("evaluations.jsonl", "metrics.jsonl", "events.jsonl", "summary.json", "settings.toml", "logs")
_STOP_S = 40.0


class Run:
    """One ``penstock up``."""

    def __init__(self, task: str, seed: int, folder: Path, flags: Sequence[str]) -> None:
        self.name = f"{task}-{seed}"
        self.folder = folder / self.name
        self.first_step_s: float | None = None
        self.seconds: float | None = None
        data = CONFIG.parent / task
        told = {
            "run.id": self.name, "run.folder": folder, "run.seed": seed, "data.path": f"{data}-train.jsonl",
            "evaluation.path": f"{data}-heldout.jsonl",
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in told.items()]
        self._log = (folder / f"{self.name}.log").open("w")
        self._began_s = time.monotonic()
        self.up = subprocess.Popen(
            [sys.executable, "-m", "penstock.services.cli", "up", str(CONFIG), *words, *flags], cwd=ROOT, stdout=self._log,
            stderr=subprocess.STDOUT, env=environment_with({}),
        )  # fmt: skip

    def look(self) -> bool:
        """Note what happened; return whether it is over."""
        now_s = round(time.monotonic() - self._began_s, 1)
        if self.first_step_s is None and steps_of(self.folder):
            self.first_step_s = now_s
        if self.seconds is None and self.up.poll() is not None:
            self.seconds = now_s
        return self.seconds is not None

    def figures(self) -> dict[str, Any]:
        """Return what it learned, how it ended, and what it did until its first step."""
        state = self.folder / "run_state.json"
        evaluations, steps = _lines(self.folder / "evaluations.jsonl"), steps_of(self.folder)
        accuracies = {line["step"]: round(line["accuracy"], 4) for line in evaluations}
        before, after = accuracies.get(0), accuracies[max(accuracies)] if len(accuracies) > 1 else None
        return {
            "run": self.name,
            "exit_code": self.up.poll(),
            "state": json.loads(state.read_text())["state"] if state.exists() else None,  # "paused" if a guard did
            "accuracy": accuracies,
            "ratio": round(after / before, 2) if before and after is not None else None,
            "steps": len(steps),
            "seconds": self.seconds,
            "first_step_s": self.first_step_s,
            "logprob_gap": round(sum(step["logprob_gap"] for step in steps[-10:]) / len(steps[-10:]), 4)
            if steps
            else None,
            "start_s": {process: row["start_s"] for process, row in ready_of(self.folder).items()},
        }

    def close(self, out: Path | None) -> None:
        """End it, and keep its records."""
        end(self.up, _STOP_S)
        self._log.close()
        if out is None:
            return
        for name in RECORDS:
            source, target = self.folder / name, out / self.name / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        shutil.copy(self._log.name, out / self.name / "console.log")


def _lines(file: Path) -> list[dict[str, Any]]:
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def finished(
    specs: Sequence[tuple[str, int]],
    together: int,
    limit_s: float,
    folder: Path,
    flags: Sequence[str],
    out: Path | None,
) -> Iterator[dict[str, Any]]:
    """Yield each run's figures once it is over, at most ``together`` at a time; at the limit all are ended."""
    waiting, running, started, ends_s = list(specs), list[Run](), 0, time.monotonic() + limit_s
    try:
        while waiting or running:
            if waiting and len(running) < together and all(run.first_step_s for run in running if started <= 2):
                running.append(Run(*waiting.pop(0), folder, flags))
                started += 1
            time.sleep(0.2)
            late = time.monotonic() > ends_s
            if late:
                waiting.clear()
                for run in running:
                    run.up.terminate()
            for run in [run for run in running if run.look() or late]:
                run.close(out)
                running.remove(run)
                yield run.figures()
    finally:
        for run in running:
            run.close(out)


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--together", type=int, default=1, help="runs at a time")
    parser.add_argument("--limit-s", type=float, default=7200.0, help="of all runs")
    parser.add_argument("--out", type=Path, help="folder for lines and records")
    arguments, flags = parser.parse_known_args()
    heed_sigterm()
    specs = [(task, seed) for seed in arguments.seeds for task in arguments.tasks]
    runs = []
    with tempfile.TemporaryDirectory(prefix="penstock-reasoning-") as folder:
        for figures in finished(specs, arguments.together, arguments.limit_s, Path(folder), flags, arguments.out):
            runs.append(figures)
            print(json.dumps(figures), flush=True)
            if arguments.out:
                with (arguments.out / "runs.jsonl").open("a") as lines:
                    lines.write(json.dumps(figures) + "\n")
    ratios = [run["ratio"] for run in runs if run["ratio"] is not None]
    lowest = min(ratios) if len(ratios) == len(specs) else None
    print(json.dumps({"lowest_ratio": lowest, "together": arguments.together, "flags": flags, "runs": runs}))


if __name__ == "__main__":
    main()
