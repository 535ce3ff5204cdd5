"""Groups with signal per generated group, with and without ``data.curriculum``.

    python -m benchmarks.curriculum --steps 80 --seeds 3  two runs of the arithmetic example for each seed
    python -m benchmarks.curriculum --fixed --seeds 20    the sampler alone: no model, success rates that do not change

Trained: 200 problems, a half that no sample solves (its answers are other texts), a quarter without a carry, which the
policy mostly solves, and a quarter with one. Fixed: 2,000 problems, 45 % never solved, 20 % always, the
others with rates between 0 and 1; 16 samples a group, 32 groups a step, one step of lag, 200 steps.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learning import ROOT, learn
from services.coordinator.admission.curriculum import Curriculum
from services.coordinator.admission.dataset import Dataset, EpochOrder, Problem
from shared.bus.stores.experience.signals import RATE, signal

_PROBLEMS = 200


def write_problems(path: Path) -> None:
    """Write the mixed problems."""
    rows = [json.loads(line) for line in (ROOT / "examples/arithmetic/train.jsonl").read_text().splitlines()]
    carries = [row for row in rows if _carries(row["prompt"])]
    plain = [row for row in rows if not _carries(row["prompt"])]
    quarter = _PROBLEMS // 4
    hopeless = [{**row, "answer": "99999"} for row in rows[-2 * quarter :]]
    mixed = [*carries[:quarter], *plain[:quarter], *hopeless]
    path.write_text("".join(json.dumps(row) + "\n" for row in mixed))


def _carries(prompt: str) -> bool:
    first, second = prompt.rstrip("=").split("+")
    return int(first[1]) + int(second[1]) > 9 or int(first) + int(second) > 99


def share(run: Path, groups_per_step: int, last: int) -> float:
    """Return the share of trained groups whose rewards differ, in the last steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-last:]
    without = sum(line["zero_std_groups"] for line in lines)
    return 1.0 - float(without) / (groups_per_step * len(lines))


def fixed_share(curriculum: bool, last: int, seed: int = 0) -> tuple[float, float]:
    """Return the share with signal of all groups, and of those of the last steps."""
    lot, problems, steps = np.random.default_rng(seed), 2000, 200
    kind, rates = lot.random(problems), lot.random(problems)
    rates[kind < 0.45], rates[kind > 0.8] = 0.0, 1.0
    rows = Dataset(tuple(Problem(f"p:{i}", "q", None, "", {}) for i in range(problems)), 0)
    order = EpochOrder(problems, seed, shuffle=True)
    drawing, signals, made = Curriculum(rows, order, seed), dict[str, float](), list[list[bool]]()
    waiting: list[list[tuple[str, float]]] = [[]]
    for step in range(steps):
        drawing.follow(signals)
        chosen = [(drawing if curriculum else order).index(32 * step + place) for place in range(32)]
        groups = [(lot.random(16) < rates[index]).astype(np.float32) for index in chosen]
        made.append([bool(rewards.any() and not rewards.all()) for rewards in groups])
        waiting.append([(f"p:{index}", signal(rewards)) for index, rewards in zip(chosen, groups, strict=True)])
        for problem, value in waiting.pop(0):
            before = signals.get(problem, value)
            signals[problem] = before + RATE * (value - before)
    return float(np.mean(made)), float(np.mean(made[-last:]))


def trained_shares(name: str, curriculum: bool, steps: int, seed: int) -> tuple[float, float]:
    """Run the example; return the share with signal of all groups, and of those of the last half."""
    with tempfile.TemporaryDirectory(prefix="penstock-curriculum-") as folder:
        data = Path(folder) / "mixed.jsonl"
        write_problems(data)
        changes: dict[str, dict[str, Any]] = {
            "data": {"path": str(data), "curriculum": curriculum},
            "run": {"seed": seed},
        }
        learn(Path(folder), name, {"groups_per_step": 16}, changes, steps)
        whole, late = (share(Path(folder) / name, 16, last) for last in (steps, steps // 2))
        return whole, late


def compare(steps: int, seed: int, *, fixed: bool) -> dict[str, float]:
    """Return the shares of one seed, and their ratio."""
    shares = {
        name: fixed_share(curriculum, 50, seed) if fixed else trained_shares(name, curriculum, steps, seed)
        for name, curriculum in (("uniform", False), ("curriculum", True))
    }
    figures: dict[str, float] = {"seed": seed}
    for place, part in enumerate(("whole", "late")):
        uniform, preferred = shares["uniform"][place], shares["curriculum"][place]
        figures |= {f"uniform_{part}": uniform, f"curriculum_{part}": preferred, f"ratio_{part}": preferred / uniform}
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    """Run each seed and print a line; the last has the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--fixed", action="store_true")
    arguments = parser.parse_args()
    by_seed = []
    for seed in range(arguments.seeds):
        by_seed.append(compare(arguments.steps, seed, fixed=arguments.fixed))
        print(json.dumps(by_seed[-1]), flush=True)
    medians = {name: statistics.median(figures[name] for figures in by_seed) for name in ("ratio_whole", "ratio_late")}
    kind = {"fixed": arguments.fixed, "steps": 200 if arguments.fixed else arguments.steps, "cores": os.cpu_count()}
    print(json.dumps({"benchmark": "curriculum", **kind, "by_seed": by_seed, **medians}))


if __name__ == "__main__":
    main()
