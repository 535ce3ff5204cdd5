"""One ``penstock up`` run of the arithmetic example with given algorithm settings."""

import dataclasses
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "config" / "arithmetic.toml"


@dataclasses.dataclass(frozen=True, slots=True)
class Learned:
    """Result of a run."""

    accuracy_before: float
    accuracy_after: float
    """Greedy, over all held-out problems."""
    steps: int
    seconds: float
    counts: dict[str, int]
    figures: dict[str, float]
    """Means over the last ten steps."""


def learn(
    folder: Path, name: str, algorithm: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]], steps: int
) -> Learned:
    """Run ``steps`` steps with ``[algorithm]`` and other ``changes``."""
    settings = tomllib.loads(CONFIG.read_text())
    settings["run"].update(id=name, folder=str(folder), steps=steps)
    settings["evaluation"]["every_steps"] = steps
    settings["trainer"]["checkpoint_every_steps"] = steps
    settings["algorithm"] = {"groups_per_step": settings["algorithm"]["groups_per_step"], **algorithm}
    for table, values in changes.items():
        settings[table].update(values)
    config = folder / f"{name}.toml"
    config.write_text(tomli_w.dumps(settings))
    started_s = time.perf_counter()
    _up(config)
    return _read(folder / name, steps, time.perf_counter() - started_s)


def _up(config: Path) -> None:
    command = [sys.executable, "-m", "penstock.services.cli", "up", str(config)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-3000:]}")


def _read(run: Path, steps: int, seconds: float) -> Learned:
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-10:]
    names = ("reward_mean", "kl_mean", "entropy", "clip_fraction", "masked_fraction", "ess", "ratio_max", "lag_mean",
             "grad_norm", "explained_variance", "preference_accuracy", "reference_kl")  # fmt: skip
    return Learned(
        accuracy_before=summary["accuracy_before"],
        accuracy_after=summary["accuracy_after"],
        steps=steps,
        seconds=round(seconds, 1),
        counts=summary["counts"],
        figures={name: _mean(lines, name) for name in names if name in lines[-1]},
    )


def _mean(lines: Sequence[dict[str, Any]], name: str) -> float:
    return round(float(sum(line[name] for line in lines)) / len(lines), 4)
