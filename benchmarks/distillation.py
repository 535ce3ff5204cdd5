"""Steps of a student to its teacher's accuracy, distilled and by GRPO, and what a teacher costs.

The teacher is the arithmetic example's policy after more of its warm start, with a pupil who forgets few carries, until it
has ``--teacher`` of problems that were set aside. The student is the example's policy; every run has the same seed, problems and learning rate.

    python -m benchmarks.distillation                     steps to the teacher's accuracy − 0.02, greedy, held-out
    python -m benchmarks.distillation --top-k 8 --minibatches 4 --students distilled
                                                          the same student, by the teacher's 8 most probable tokens
    python -m benchmarks.distillation --cost --rounds 2 --top-k 8
                                                          a step without a teacher, with its logprob of each sampled token,
                                                          and with its 8 most probable tokens too: wall time, and processor
                                                          time of each service

Where the teacher has a device of its own, a step costs what the other services spend more: ``beside_the_teacher`` is
the processor time of all services but the reward service, against that without a teacher.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
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
_LOOK_S = 0.05
Spent = dict[str, float]
"""Processor time by service, seconds."""


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


@contextmanager
def processor_times(run: Path) -> Iterator[dict[int, Spent]]:
    """Yield, after the block, the processor time of each service at the steps that were seen to end."""
    seen: dict[int, Spent] = {}
    stopped = threading.Event()

    def look() -> None:
        while not stopped.wait(_LOOK_S):
            with suppress(OSError, ValueError, psutil.Error):
                step = (run / "metrics.jsonl").read_bytes().count(b"\n")
                if step not in seen:
                    seen[step] = _spent(json.loads((run / "up.json").read_text()))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        stopped.set()
        looking.join()


def _spent(table: Mapping[str, Any]) -> Spent:
    services = {row["pid"]: row["service"] for row in table["processes"] if row["pid"]}
    spent: Spent = {}
    for process in psutil.Process(table["pid"]).children(recursive=True):
        own = [process.pid, *(parent.pid for parent in process.parents())]
        service = next((services[pid] for pid in own if pid in services), process.name())
        times = process.cpu_times()
        spent[service] = spent.get(service, 0.0) + times.user + times.system
    return spent


def cost(folder: Path, teacher: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return wall and processor time of a step with each kind of teaching and without, in alternating runs."""
    cases: dict[str, Mapping[str, Any]] = {
        "none": {},
        "sampled": {"distillation": 1.0, "distillation_skew": DISTILLED["distillation_skew"]},
    }
    if arguments.top_k:
        cases["top_k"] = {"distillation": 1.0, "distillation_top_k": arguments.top_k}
    wall: dict[str, list[float]] = {case: [] for case in cases}
    spent: dict[str, list[Spent]] = {case: [] for case in cases}
    for number in range(arguments.rounds):
        for case in list(cases)[:: -1 if number % 2 else 1]:
            name = f"{case}-{number}"
            with processor_times(folder / name) as seen:
                reward = {"reward": with_teacher(teacher) if case != "none" else {}}
                learn(folder, name, {**GRPO, **cases[case]}, reward, arguments.steps)
            lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
            ends = [line["finished_at_s"] for line in lines[WARM_STEPS:]]
            wall[case] += [later - earlier for earlier, later in pairwise(ends)]
            spent[case].append(_a_step(seen, arguments.steps))
            print(name, statistics.median(wall[case]), spent[case][-1], flush=True)
    return {"step_s": {case: statistics.median(values) for case, values in wall.items()}, **_compared(spent)}


def _a_step(seen: Mapping[int, Spent], steps: int) -> Spent:
    """Return the mean of the steps between the first after the warm-up and the last but one."""
    first, last = min(step for step in seen if step >= WARM_STEPS), max(step for step in seen if step < steps)
    return {
        service: (seen[last][service] - seen[first].get(service, 0.0)) / (last - first)
        for service in sorted(seen[last])
    }


def _compared(spent: Mapping[str, list[Spent]]) -> dict[str, Any]:
    """Return each service's processor time, and its ratio to the run of the same round without a teacher: medians."""
    medians = {
        case: {service: round(statistics.median(each[service] for each in rounds), 4) for service in rounds[0]}
        for case, rounds in spent.items()
    }

    def ratios(of: Callable[[Spent], float]) -> dict[str, float]:
        pairs = {case: zip(rounds, spent["none"], strict=True) for case, rounds in spent.items()}
        return {
            case: round(statistics.median(of(its) / of(without) for its, without in rounds), 3)
            for case, rounds in pairs.items()
        }

    return {
        "processor_s": medians,
        "trainer": ratios(lambda services: services["trainer"]),
        "beside_the_teacher": ratios(lambda services: sum(services.values()) - services["reward"]),
    }


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
