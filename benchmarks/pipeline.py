"""The demo's work asynchronous, synchronous (``max_lag = 0``) and by TRL's GRPOTrainer, in turn on the same machine.

Work: 32 prompts × 16 samples a step, 4 new tokens, the example's policy and problems, learning rate and optimizer alike. The
first third of each run's steps is warm-up; rates are samples ÷ seconds between commits after it. Evaluation is off.

    python -m benchmarks.pipeline --steps 60 --rounds 3

Prints where the time of a step goes (seconds by phase), then one JSON object: ``async_over_trl``, ``async_over_sync``
(medians of the rounds' ratios) and ``samples_per_s`` of each.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "config" / "arithmetic.toml"
PHASES = ("wait", "forward_backward", "optimizer", "snapshot", "commit", "checkpoint")


def run_penstock(folder: Path, steps: int, max_lag: int) -> tuple[float, dict[str, float]]:
    """Run ``penstock up`` and return (samples per second, mean seconds by phase) after the warm-up."""
    settings = tomllib.loads(CONFIG.read_text())
    del settings["evaluation"]
    settings["run"].update(id=f"lag-{max_lag}", folder=str(folder), steps=steps)
    settings["algorithm"]["max_lag"] = max_lag
    settings["trainer"]["checkpoint_every_steps"] = steps
    config = folder / f"lag-{max_lag}.toml"
    config.write_text(tomli_w.dumps(settings))
    _run([sys.executable, "-m", "services", "up", str(config)], folder)
    lines = [json.loads(line) for line in (folder / f"lag-{max_lag}" / "metrics.jsonl").read_text().splitlines()]
    measured = lines[max(2, steps // 3) - 1 :]
    seconds = measured[-1]["finished_at_s"] - measured[0]["finished_at_s"]
    phases = {phase: _mean(measured[1:], f"phase_{phase}_s") for phase in PHASES}
    phases["generate (each group, in parallel)"] = _mean(measured[1:], "generate_s_mean")
    phases["score (each group, in parallel)"] = _mean(measured[1:], "score_s_mean")
    phases["step"] = seconds / (len(measured) - 1)
    return sum(line["samples"] for line in measured[1:]) / seconds, phases


def _mean(lines: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.fmean(line.get(name, 0.0) for line in lines)


def run_trl(folder: Path, steps: int) -> float:
    """Run the baseline on the same work and return its samples per second."""
    settings = tomllib.loads(CONFIG.read_text())
    command = [sys.executable, "-m", "benchmarks.trl_grpo", "--model", str(ROOT / settings["policy"]["model"])]
    command += ["--prompts", str(ROOT / settings["data"]["path"]), "--steps", str(steps)]
    command += ["--learning-rate", str(settings["trainer"]["learning_rate"])]
    output = _run(command, folder)
    return float(json.loads(output.strip().splitlines()[-1])["samples_per_s"])


def _run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=_work(folder), env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-3000:]}")
    return done.stdout


def _work(folder: Path) -> Path:
    """A working directory from which the config's relative paths hold."""
    for name in ("examples", "config"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    return folder


def main() -> None:
    """Run the three in turn, several rounds, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {"async": [], "sync": [], "trl": []}
    phases: dict[str, dict[str, float]] = {}
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
            folder = Path(name)
            for mode, max_lag in (("async", 1), ("sync", 0)):
                rate, phases[mode] = run_penstock(folder, arguments.steps, max_lag)
                rates[mode].append(rate)
            rates["trl"].append(run_trl(folder, arguments.steps))
        print(f"round {number + 1}: " + "  ".join(f"{mode} {found[-1]:,.0f}/s" for mode, found in rates.items()))
    print(f"\n{'seconds a step':40s}{'async':>10s}{'sync':>10s}")
    for phase in phases["async"]:
        print(f"{phase:40s}{phases['async'][phase]:10.4f}{phases['sync'][phase]:10.4f}")
    print(json.dumps(_figures(rates)))


def _figures(rates: dict[str, list[float]]) -> dict[str, object]:
    def ratio(over: str) -> float:
        return round(statistics.median(a / b for a, b in zip(rates["async"], rates[over], strict=True)), 3)

    return {
        "async_over_trl": ratio("trl"),
        "async_over_sync": ratio("sync"),
        "samples_per_s": {mode: round(statistics.median(found), 1) for mode, found in rates.items()},
        "rounds": len(rates["trl"]),
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
