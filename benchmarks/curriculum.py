"""Groups with signal per generated group, with and without ``data.curriculum``.

    python -m benchmarks.curriculum --steps 80 --seeds 3  two runs of the arithmetic example for each seed
    python -m benchmarks.curriculum --fixed --seeds 20    the sampler alone: no model, success rates that do not change

Trained: 200 problems, a half that no sample solves (its answers are other texts), a quarter without a carry, which the
policy mostly solves, and a quarter with one. What was learned is the greedy accuracy of the solvable half, every 5
steps, and of the example's held-out problems. Fixed: 2,000 problems, 45 % never solved, 20 % always, the others with
rates between 0 and 1; 16 samples a group, 32 groups a step, one step of lag, 200 steps.
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

_PROBLEMS, _GROUPS_PER_STEP, _REACHED = 200, 16, 0.9
_HELD_OUT = ROOT / "examples/arithmetic/heldout.jsonl"


def write_problems(path: Path, solvable: Path) -> None:
    """Write the mixed problems, and those of them that can be solved."""
    rows = [json.loads(line) for line in (ROOT / "examples/arithmetic/train.jsonl").read_text().splitlines()]
    carries = [row for row in rows if _carries(row["prompt"])]
    plain = [row for row in rows if not _carries(row["prompt"])]
    quarter = _PROBLEMS // 4
    hopeless = [{**row, "answer": "99999"} for row in rows[-2 * quarter :]]
    both = [*carries[:quarter], *plain[:quarter]]
    for file, rows in ((path, [*both, *hopeless]), (solvable, both)):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _carries(prompt: str) -> bool:
    first, second = prompt.rstrip("=").split("+")
    return int(first[1]) + int(second[1]) > 9 or int(first) + int(second) > 99


def share(run: Path, last: int) -> float:
    """Return the share of trained groups whose rewards differ, in the last steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.fmean(line["signal_fraction"] for line in lines[-last:])


def learned(run: Path) -> dict[str, float]:
    """Return the accuracy of the solvable problems at the end, and the groups until it reached ``_REACHED``."""
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    curve = sorted((line["step"], line["accuracy"]) for line in lines if line["set"] == "solvable")
    reached = [step * _GROUPS_PER_STEP for step, accuracy in curve if accuracy >= _REACHED]
    return {"solvable": curve[-1][1], "groups": reached[0] if reached else float("inf")}


def fixed_figures(curriculum: bool, last: int, seed: int = 0) -> dict[str, float]:
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
    return {"whole": float(np.mean(made)), "late": float(np.mean(made[-last:]))}


def trained_figures(name: str, curriculum: bool, steps: int, seed: int) -> dict[str, float]:
    """Run the example; return the share with signal of all groups, of those of the last half, and what was learned."""
    with tempfile.TemporaryDirectory(prefix="penstock-curriculum-") as folder:
        data, solvable = Path(folder) / "mixed.jsonl", Path(folder) / "solvable.jsonl"
        write_problems(data, solvable)
        changes: dict[str, dict[str, Any]] = {
            "data": {"path": str(data), "curriculum": curriculum},
            "run": {"seed": seed},
            "evaluation": {
                "path": {"held_out": str(_HELD_OUT), "solvable": str(solvable)},
                "every_steps": {"held_out": steps, "solvable": 5},
            },
        }
        after = learn(Path(folder), name, {"groups_per_step": _GROUPS_PER_STEP}, changes, steps).accuracy_after
        run = Path(folder) / name
        return {"whole": share(run, steps), "late": share(run, steps // 2), "held_out": after, **learned(run)}


def compare(steps: int, seed: int, *, fixed: bool) -> dict[str, float]:
    """Return the figures of one seed, and the ratios of its shares."""
    both = {
        name: fixed_figures(curriculum, 50, seed) if fixed else trained_figures(name, curriculum, steps, seed)
        for name, curriculum in (("uniform", False), ("curriculum", True))
    }
    figures: dict[str, float] = {"seed": seed}
    figures |= {f"{order}_{name}": value for order, its in both.items() for name, value in its.items()}
    figures |= {f"ratio_{part}": both["curriculum"][part] / both["uniform"][part] for part in ("whole", "late")}
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
    medians = {name: statistics.median(figures[name] for figures in by_seed) for name in by_seed[0] if name != "seed"}
    kind = {"fixed": arguments.fixed, "steps": 200 if arguments.fixed else arguments.steps, "cores": os.cpu_count()}
    print(json.dumps({"benchmark": "curriculum", **kind, "by_seed": by_seed, **medians}))


if __name__ == "__main__":
    main()
