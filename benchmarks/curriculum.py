"""Groups with signal per generated group, with and without ``data.curriculum``.

    python -m benchmarks.curriculum --seeds 3             two runs of the arithmetic example for each seed
    python -m benchmarks.curriculum --small --seeds 3     the same with fewer problems, which are soon solved
    python -m benchmarks.curriculum --fixed --seeds 20    the sampler alone: no model, success rates that do not change
    python -m benchmarks.curriculum --moving --seeds 20   the same with rates that change as those of the example do

Fixed: 2,000 problems, 45 % never solved, 20 % always, the others with rates between 0 and 1; 16 samples a group, 32
groups a step, one step of lag, 200 steps, which are 3.2 epochs. Trained: 400 problems of the same composition for as
many epochs, 80 steps of 16 groups. 45 % are never solved (their answers are other texts), 20 % are additions without a
carry, which the policy mostly solves, the others have one. Small: 200 problems, 50 % never solved, 25 % without a carry.

Moving: no model, the composition of a trained run. A problem's logit follows a random walk around the mean of its kind,
and its own groups raise it; drift, noise and that effect are about those of a uniform run of the example. For
comparison, a sampler (``filter``) knows this model: it holds a distribution over each problem's logit, and draws by the
fourth power of the probability of signal, the best of 1, 2, 4 and the largest alone.

The bound is an oracle: a policy's true pass rate is the probability of the right answer, so the shares that a uniform
draw (``uniform_draw``) and a draw by the true p(1 − p) (``oracle``) would have had with the policies of a run are
computed, not sampled.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.learning import ROOT, learn
from penstock.services.coordinator.admission.curriculum import Curriculum, chances
from penstock.services.coordinator.admission.dataset import Dataset, EpochOrder, Problem
from penstock.shared.bus.stores.experience.signals import RATE, signal

_EXAMPLE = ROOT / "examples/arithmetic"
_STEPS, _GROUPS_PER_STEP, _GROUP_SIZE, _CHECKPOINT_STEPS = 80, 16, 16, 5
_NEVER = "99999"
"""Longer than a completion."""

Rows = list[dict[str, str]]
Rates = npt.NDArray[np.float64]


def mixed_problems(*, small: bool) -> Rows:
    """Return the problems of a trained run."""
    rows = [json.loads(line) for line in (_EXAMPLE / "train.jsonl").read_text().splitlines()]
    never, plain, carrying = (100, 50, 50) if small else (180, 80, 140)
    unsolved = [{**row, "answer": _NEVER} for row in rows[-never:]]
    return [
        *[row for row in rows if _carries(row["prompt"])][:carrying],
        *[row for row in rows if not _carries(row["prompt"])][:plain],
        *unsolved,
    ]


def _carries(prompt: str) -> bool:
    first, second = prompt.rstrip("=").split("+")
    return int(first[1]) + int(second[1]) > 9 or int(first) + int(second) > 99


def trained_figures(name: str, curriculum: bool, seed: int, *, small: bool) -> dict[str, float]:
    """Run the example; return the shares with signal of the whole run and its last half, and what was learned."""
    rows, half = mixed_problems(small=small), _STEPS // 2
    with tempfile.TemporaryDirectory(prefix="penstock-curriculum-") as folder:
        data, run = Path(folder) / "mixed.jsonl", Path(folder) / name
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        changes: dict[str, dict[str, Any]] = {
            "data": {"path": str(data), "curriculum": curriculum},
            "run": {"seed": seed},
            "trainer": {"checkpoint_every_steps": _CHECKPOINT_STEPS, "keep_last": _STEPS},
        }
        held_out = learn(Path(folder), name, {"groups_per_step": _GROUPS_PER_STEP}, changes, _STEPS).accuracy_after
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rates = list(pass_rates(run, rows))
    shares = [line["signal_fraction"] for line in lines]
    uniform, oracle = zip(*(expected_shares(before) for before in rates[:-1]), strict=True)
    solvable = [row["answer"] != _NEVER for row in rows]
    return {
        "whole": statistics.fmean(shares),
        "late": statistics.fmean(shares[half:]),
        "uniform_draw": statistics.fmean(uniform),
        "oracle": statistics.fmean(oracle),
        "oracle_late": statistics.fmean(oracle[len(oracle) // 2 :]),
        "pass_rate": float(rates[-1][solvable].mean()),
        "held_out": held_out,
    }


def expected_shares(rates: Rates) -> tuple[float, float]:
    """Return the expected share with signal of problems drawn uniformly, and by their true p(1 − p)."""
    with_signal = 1 - rates**_GROUP_SIZE - (1 - rates) ** _GROUP_SIZE
    return float(with_signal.mean()), float(chances(rates * (1 - rates)) @ with_signal)


def pass_rates(run: Path, rows: Rows) -> Iterator[Rates]:
    """Yield the true pass rate of each problem: of the initial policy, and of each checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    from penstock.services.trainer.model.engine import saved_tensors

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(_EXAMPLE / "policy")
    yield _pass_rates(model, rows)
    for checkpoint in sorted((run / "checkpoints").glob("step-*")):
        model.load_state_dict(saved_tensors(checkpoint / "engine", 1))
        yield _pass_rates(model, rows)


def _pass_rates(model: Any, rows: Rows) -> Rates:
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_EXAMPLE / "policy")
    rates = np.zeros(len(rows))
    for length in (2, 3):
        places = [place for place, row in enumerate(rows) if len(row["answer"]) == length]
        texts = [rows[place]["prompt"] + rows[place]["answer"] + tokenizer.eos_token for place in places]
        ids_BT = torch.tensor(tokenizer(texts)["input_ids"])
        with torch.no_grad():
            logprobs = model(ids_BT).logits[:, :-1].log_softmax(-1)
        chosen = logprobs.gather(-1, ids_BT[:, 1:, None])[:, -(length + 1) :, 0]
        rates[places] = chosen.sum(1).exp().double().numpy()
    return rates


def fixed_figures(curriculum: bool, seed: int) -> dict[str, float]:
    """Return the share with signal of all groups, and of those of the last 50 steps."""
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
        groups = [(lot.random(_GROUP_SIZE) < rates[index]).astype(np.float32) for index in chosen]
        made.append([bool(rewards.any() and not rewards.all()) for rewards in groups])
        waiting.append([(f"p:{index}", signal(rewards)) for index, rewards in zip(chosen, groups, strict=True)])
        for problem, value in waiting.pop(0):
            before = signals.get(problem, value)
            signals[problem] = before + RATE * (value - before)
    return {"whole": float(np.mean(made)), "late": float(np.mean(made[-50:]))}


class Moving:
    """Success rates that change as in the example. Problems with a carry begin unsolved, those without mostly solved."""

    reverts, noise, learned = 0.08, 0.5, 1.1
    """Per step: share of the distance to the mean of its kind, deviation of the walk, effect of a group with p = ½."""

    def __init__(self, seed: int) -> None:
        self.lot = np.random.default_rng(seed)
        self.carries = np.arange(220) < 140
        self.logits = np.where(self.carries, self.lot.normal(-1.3, 1.2, 220), self.lot.normal(4.3, 1.0, 220))
        self.step = 0

    @property
    def rates(self) -> Rates:
        """Of the solvable problems, then of those that are never solved."""
        return np.concatenate([1 / (1 + np.exp(-self.logits)), np.zeros(180)])

    def mean(self, step: int) -> Rates:
        """Return the mean logit of each problem's kind."""
        return np.where(self.carries, 2.6 - 3.9 * np.exp(-step / 20), 3.6 + 0.7 * np.exp(-step / 3))

    def train(self, groups: Sequence[tuple[int, int]]) -> None:
        """Move on by a step that trained groups (problem, successes)."""
        before, self.step = self.mean(self.step), self.step + 1
        change = self.reverts * (before - self.logits) + self.mean(self.step) - before
        for index, solved in groups:
            if index < len(self.logits):
                change[index] += self.learned * effect(solved)
        self.logits += change + self.noise * self.lot.standard_normal(len(self.logits))


def effect(solved: int) -> float:
    """Return how much a group teaches of its problem, at most about 1.5."""
    share = solved / _GROUP_SIZE
    return 4 * share * math.sqrt(1 - share)


class Filter:
    """The distribution of each problem's logit, and the probability that it is never solved, after its groups."""

    _POWER = 4
    _LOGITS = np.linspace(-6, 9, 61)

    def __init__(self, problems: int) -> None:
        x, counts = self._LOGITS, np.arange(_GROUP_SIZE + 1)[:, None]
        rates = 1 / (1 + np.exp(-x))
        prior = np.exp(-0.5 * ((x - 0.5) / 2.5) ** 2)
        self._logits = np.tile(prior / prior.sum(), (problems, 1))
        self._never = np.full(problems, 0.45)
        ways = np.array([math.comb(_GROUP_SIZE, count) for count in counts[:, 0]])[:, None]
        self._likelihoods = ways * rates**counts * (1 - rates) ** (_GROUP_SIZE - counts)
        self._signal = 1 - rates**_GROUP_SIZE - (1 - rates) ** _GROUP_SIZE
        moved = x + Moving.reverts * (1.5 - x) + 0.02
        steps = np.exp(-0.5 * ((x - moved[:, None]) / Moving.noise) ** 2)
        self._steps = steps / steps.sum(1, keepdims=True)

    def draw(self, lot: np.random.Generator) -> list[int]:
        """Return the problems of a step."""
        weights = ((1 - self._never) * (self._logits @ self._signal)) ** self._POWER
        return [int(index) for index in lot.choice(len(weights), _GROUPS_PER_STEP, p=weights / weights.sum())]

    def train(self, groups: Sequence[tuple[int, int]]) -> None:
        """Learn from the groups of a step that was trained, and move on by it."""
        for index, solved in groups:
            likely = self._logits[index] * self._likelihoods[solved]
            never = self._never[index] * (solved == 0)
            self._never[index] = never / (never + (1 - self._never[index]) * likely.sum())
            shift = Moving.learned * effect(solved)
            shifted = np.interp(self._LOGITS - shift, self._LOGITS, likely, left=0.0, right=0.0)
            self._logits[index] = shifted / shifted.sum()
        self._logits = self._logits @ self._steps


def moving_figures(order: str, seed: int) -> dict[str, float]:
    """Return the share with signal of all groups, and of those of the last half."""
    world, signals, made = Moving(seed), dict[str, float](), list[list[bool]]()
    rows = Dataset(tuple(Problem(f"p:{i}", "q", None, "", {}) for i in range(400)), 0)
    uniform, known = EpochOrder(400, seed, shuffle=True), Filter(400)
    drawing = Curriculum(rows, uniform, seed)
    waiting: list[list[tuple[int, int]]] = [[], []]
    for step in range(_STEPS):
        drawing.follow(signals)
        by_place = drawing if order == "curriculum" else uniform
        places = range(_GROUPS_PER_STEP * step, _GROUPS_PER_STEP * (step + 1))
        chosen = known.draw(world.lot) if order == "filter" else [by_place.index(place) for place in places]
        groups = [(index, int(world.lot.binomial(_GROUP_SIZE, world.rates[index]))) for index in chosen]
        made.append([0 < solved < _GROUP_SIZE for _, solved in groups])
        waiting.append(groups)
        trained = waiting.pop(0)
        for index, solved in trained:
            value = signal((np.arange(_GROUP_SIZE) < solved).astype(np.float32))
            before = signals.get(f"p:{index}", value)
            signals[f"p:{index}"] = before + RATE * (value - before)
        known.train(trained)
        world.train(trained)
    return {"whole": float(np.mean(made)), "late": float(np.mean(made[_STEPS // 2 :]))}


def compare(seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one seed, and the ratios of its shares."""
    orders = ("uniform", "curriculum", "filter") if arguments.moving else ("uniform", "curriculum")
    by_order = {
        name: moving_figures(name, seed)
        if arguments.moving
        else fixed_figures(name == "curriculum", seed)
        if arguments.fixed
        else trained_figures(name, name == "curriculum", seed, small=arguments.small)
        for name in orders
    }
    uniform, preferred = by_order["uniform"], by_order["curriculum"]
    figures: dict[str, float] = {"seed": seed}
    figures |= {f"{order}_{name}": value for order, its in by_order.items() for name, value in its.items()}
    figures |= {f"ratio_{part}": preferred[part] / uniform[part] for part in ("whole", "late")}
    return {name: round(value, 3) for name, value in figures.items()}


def medians(by_seed: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return each figure's median over the seeds."""
    return {name: statistics.median(figures[name] for figures in by_seed) for name in by_seed[0] if name != "seed"}


def main() -> None:
    """Run each seed and print a line; the last has the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--moving", action="store_true")
    arguments = parser.parse_args()
    by_seed = []
    for seed in range(arguments.seeds):
        by_seed.append(compare(seed, arguments))
        print(json.dumps(by_seed[-1]), flush=True)
    kind = "moving" if arguments.moving else "fixed" if arguments.fixed else "small" if arguments.small else "mixed"
    result = {"benchmark": "curriculum", "problems": kind, "cores": os.cpu_count(), "by_seed": by_seed}
    print(json.dumps({**result, **medians(by_seed)}))


if __name__ == "__main__":
    main()
