"""Steps of a student to its teacher's accuracy, distilled and by GRPO, and what a teacher costs.

The teacher is the arithmetic example's policy after more of its warm start, with a pupil who forgets few carries, until it
has ``--teacher`` of problems that were set aside. The student is the example's policy; every run has the same seed, problems and learning rate.

    python -m benchmarks.distillation                     steps to the teacher's accuracy − 0.02, greedy, held-out
    python -m benchmarks.distillation --top-k 8 --minibatches 4 --students distilled
                                                          the same student, by the teacher's 8 most probable tokens
    python -m benchmarks.distillation --cost --rounds 2   time of a step with the teacher in the reward service / without
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning import ROOT, learn
from benchmarks.learning_task import evaluations
from examples.arithmetic.make import (
    WarmStart,
    addition,
    build_tokenizer,
    encode,
    greedy_accuracy,
    split_pairs,
    warm_start,
)

EXAMPLE = ROOT / "examples" / "arithmetic"
GRPO: Mapping[str, Any] = {"max_lag": 1, "clip": [0.2, 0.28]}
DISTILLED: Mapping[str, Any] = {
    **GRPO, "advantage": "none", "distillation": 1.0, "distillation_skew": 0.1, "groups_per_step": 256,
}  # fmt: skip
UNBOUNDED: Mapping[str, Any] = {name: value for name, value in DISTILLED.items() if name != "distillation_skew"}
"""The KL over a teacher's most probable tokens has no term to bound."""
GROUP_SIZE = 2
"""Of the distilled student: as many samples a step as GRPO's 32 × 16. A teacher's signal needs no groups."""
FORGETS = 0.05
"""Of the teacher's training answers, the share that forgets a carry: without any, what it never writes is all but impossible."""
WARM_STEPS = 5


def make_teacher(folder: Path, accuracy: float) -> float:
    """Write the teacher; return its held-out accuracy."""
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    model = Qwen2ForCausalLM.from_pretrained(EXAMPLE / "policy")
    train, held_out = split_pairs(seed=0)
    goal = WarmStart(forget_probability=FORGETS, min_steps=100, target=(accuracy, 1.0))
    warm_start(model, tokenizer, train, goal)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return greedy_accuracy(model, *encode(tokenizer, [addition(a, b) for a, b in held_out]))


def with_teacher(teacher: Path) -> dict[str, Any]:
    """Return the ``[reward]`` keys of a run with the teacher in its reward service."""
    return {"teachers": [{"name": "adder", "model": str(teacher)}]}


def steps_to(run: Path, accuracy: float) -> int | None:
    """Return the first evaluated step with ``accuracy``."""
    return next((row["step"] for row in evaluations(run) if row["accuracy"] >= accuracy), None)


def compare(folder: Path, teacher: Path, accuracy: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both students; return their steps to ``accuracy``."""
    steps: dict[str, int | None] = {}
    distilled: Mapping[str, Any] = (
        {**UNBOUNDED, "distillation_top_k": arguments.top_k} if arguments.top_k else DISTILLED
    )
    for name, algorithm, most, every in (
        ("distilled", distilled, arguments.steps // 5, 1),
        ("grpo", GRPO, arguments.steps, 5),
    ):
        if name not in arguments.students:
            continue
        algorithm = {**algorithm, "minibatches": arguments.minibatches}
        changes: dict[str, dict[str, Any]] = {
            "evaluation": {"every_steps": every, "problems": 500},
            "run": {"seed": arguments.seed},
            "reward": with_teacher(teacher) if name == "distilled" else {},
            "sampling": {"group_size": GROUP_SIZE} if name == "distilled" else {},
        }
        learned = learn(folder, name, algorithm, changes, most)
        steps[name] = steps_to(folder / name, accuracy)
        curve = [[row["step"], row["accuracy"]] for row in evaluations(folder / name)]
        print(name, steps[name], learned.accuracy_after, learned.seconds, curve, flush=True)
    taught, grpo = steps.get("distilled"), steps.get("grpo")
    return {"steps": steps, "ratio": round(taught / grpo, 3) if taught and grpo else None, "accuracy": accuracy}


def cost(folder: Path, teacher: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the time of a step with a teacher and without, in alternating runs."""
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(2 * arguments.rounds):
        case = ("with", "without", "without", "with")[number % 4]
        name = f"{case}-{number}"
        learn(folder, name, GRPO, {"reward": with_teacher(teacher) if case == "with" else {}}, arguments.steps)
        lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        ends = [line["finished_at_s"] for line in lines[WARM_STEPS:]]
        seconds[case] += [later - earlier for earlier, later in pairwise(ends)]
    medians = {case: statistics.median(values) for case, values in seconds.items()}
    return {"step_s": medians, "ratio": round(medians["with"] / medians["without"], 3), "rounds": arguments.rounds}


def main() -> None:
    """Print one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=float, default=0.97, help="held-out accuracy at which its supervision ends")
    parser.add_argument("--steps", type=int, default=200, help="of GRPO, and of each run of --cost")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--students", nargs="+", choices=("distilled", "grpo"), default=["distilled", "grpo"])
    parser.add_argument("--top-k", type=int, default=0, help="the teacher's most probable tokens; 0: the sampled one")
    parser.add_argument("--minibatches", type=int, default=1, help="optimizer updates of a step, of every student")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-distillation-") as name:
        folder = Path(name)
        accuracy = make_teacher(folder / "teacher", arguments.teacher)
        print("teacher", accuracy, flush=True)
        if arguments.cost:
            result = cost(folder, folder / "teacher", arguments)
        else:
            result = compare(folder, folder / "teacher", accuracy - 0.02, arguments)
    shown = {
        "seed": arguments.seed,
        "most_steps": arguments.steps,
        "top_k": arguments.top_k,
        "minibatches": arguments.minibatches,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }
    print(json.dumps({"benchmark": "distillation", "teacher_accuracy": accuracy, **shown, **result}))


if __name__ == "__main__":
    main()
