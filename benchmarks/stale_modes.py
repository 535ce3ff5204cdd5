"""What each ``on_stale`` mode trains of completions with a long tail, by length: a simulation, token by token.

    python -m benchmarks.stale_modes

``room`` samples decode at once, a token each a tick; lengths are log-normal. Groups are admitted as by
the coordinator, a sample's tokens get the version of their tick, a step takes ``step-ticks`` beside decoding, and its
batch are the groups admitted first. Which tokens are stale says the trainer's own ``find_contexts``. By quartile of
length: samples and tokens trained per admitted one, and where the trained tokens are in their sample (0.5: all of it, or
evenly). Prints a Markdown table, then one JSON object.
"""

import argparse
import dataclasses
import json
from collections import deque
from typing import Any

import numpy as np

from penstock.services.trainer.batch.staleness import find_contexts
from penstock.shared.bus.messages import FinishReason, GroupId, PolicyVersion, Prompt, RolloutGroup, Sample, Sampling

MODES = ("drop", "mask", "requeue", "wait")
NEW = PolicyVersion(0)


@dataclasses.dataclass
class Decoding:
    """A sample on its way: the first token of each version."""

    group: int
    place: int
    length: int
    tokens: int = 0
    spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def made(self) -> Sample:
        """Return the sample."""
        zeros = np.zeros(self.length, np.float32)
        return Sample(zeros.astype(np.int32), zeros, np.array(self.spans, np.int32), FinishReason.STOP, "")


class Run:
    """A run of one mode."""

    def __init__(self, mode: str, arguments: argparse.Namespace) -> None:
        self.mode, self.of = mode, arguments
        self.lot = np.random.default_rng(arguments.seed)
        self.admitted_GS = self._lengths((4 * arguments.steps * arguments.groups, arguments.samples))
        self.length_GS = self.admitted_GS.copy()
        self.first_trained_GS = self.length_GS.copy()
        self.waiting: deque[Decoding] = deque()
        self.active: list[Decoding] = []
        self.made: dict[int, dict[int, Sample]] = {}
        self.requeued: set[int] = set()
        self.ended: set[int] = set()
        self.admitted = self.step = self.ticks = self.generated = 0
        self.steps: dict[PolicyVersion, int] = {NEW: 0}

    def _lengths(self, shape: tuple[int, ...]) -> Any:
        drawn = self.lot.lognormal(np.log(self.of.tokens), self.of.sigma, shape)
        return np.clip(drawn.round(), 1, 16 * self.of.tokens).astype(int)

    def simulate(self) -> dict[str, Any]:
        """Run all steps, and return the figures."""
        ends, batch = 0, dict[int, tuple[int, ...]]()
        while self.step < self.of.steps:
            self._admit()
            if not batch and (batch := self._batch()):
                ends = self.ticks + self.of.step_ticks
            self._decode()
            if batch and self.ticks >= ends:
                for group, contexts in batch.items():
                    self.first_trained_GS[group] = contexts
                    self._end(group)
                self.step, batch = self.step + 1, {}
                self.steps[PolicyVersion(self.step)] = self.step
        return self._figures()

    def _admit(self) -> None:
        while self.admitted - len(self.ended) < (self.of.max_lag + 1) * self.of.groups:
            self.made[self.admitted] = {}
            self._queue(self.admitted, range(self.of.samples))
            self.admitted += 1

    def _queue(self, group: int, places: Any) -> None:
        self.waiting.extend(Decoding(group, place, int(self.length_GS[group, place])) for place in places)

    def _decode(self) -> None:
        while self.waiting and len(self.active) < self.of.room:
            self.active.append(self.waiting.popleft())
        self.ticks += 1
        for each in self.active:
            if not each.spans or each.spans[-1][1] != self.step:
                each.spans.append((each.tokens, self.step))
            each.tokens += 1
            self.generated += 1
            if each.tokens == each.length:
                self.made[each.group][each.place] = each.made()
        self.active = [each for each in self.active if each.tokens < each.length]

    def _batch(self) -> dict[int, tuple[int, ...]]:
        """Return the contexts of the next step's groups, as the trainer's intake chooses them; empty: too few."""
        fresh: dict[int, tuple[int, ...]] = {}
        complete = sorted(group for group, samples in self.made.items() if len(samples) == self.of.samples)
        for group in complete if len(complete) >= self.of.groups else ():
            whole = self._group(group)
            how = "mask" if self.mode == "mask" else "sample"
            contexts = find_contexts(whole, self.step, self.steps, self.of.max_lag, how)  # type: ignore[arg-type]
            if any(contexts) and self.mode == "requeue":
                self._requeue(group, contexts)
            elif contexts == tuple(self.length_GS[group].tolist()):
                self.first_trained_GS[group] = contexts
                self._end(group)
            else:
                fresh[group] = contexts
        chosen = dict(list(fresh.items())[: self.of.groups])
        overtaken = (
            self.mode == "wait" and chosen and any(group < max(chosen) for group in self.made.keys() - fresh.keys())
        )
        return chosen if len(chosen) == self.of.groups and not overtaken else {}

    def _group(self, group: int) -> RolloutGroup:
        prompt = Prompt(GroupId(group), "", Sampling(self.of.samples, 1, 1.0))
        samples = tuple(self.made[group][place] for place in range(self.of.samples))
        return RolloutGroup(prompt, np.zeros(1, np.int32), samples, "", 0.0, 0.0)

    def _requeue(self, group: int, contexts: tuple[int, ...]) -> None:
        again = [place for place, context in enumerate(contexts) if context or group in self.requeued]
        self.requeued.add(group)
        for place in again:
            del self.made[group][place]
            self.length_GS[group, place] = self._lengths(())  # another draw of the same prompt
        self._queue(group, again)

    def _end(self, group: int) -> None:
        del self.made[group]
        self.ended.add(group)

    def _figures(self) -> dict[str, Any]:
        groups = sorted(self.ended)
        admitted, length = self.admitted_GS[groups].ravel(), self.length_GS[groups].ravel()
        first = np.minimum(self.first_trained_GS[groups].ravel(), length)
        bounds = np.quantile(admitted, (0.25, 0.5, 0.75))

        def share(part: Any, of: Any, lengths: Any = admitted) -> list[float]:
            own, other = np.searchsorted(bounds, length), np.searchsorted(bounds, lengths)
            return [round(float(part[own == q].sum() / of[other == q].sum()), 3) for q in range(4)]

        ones, some = np.ones(len(length)), first < length
        middle = (first + length) / 2 / length  # of the trained tokens, relative to the sample
        trained = (length - first).sum()
        return {
            "samples": share(some, ones),
            "tokens": share(length - first, admitted),
            "middle_of_trained": share(np.where(some, middle, 0.0), np.maximum(some, 1e-9), length),
            "ticks_a_step": round(self.ticks / self.of.steps, 1),
            "trained_of_generated": round(float(trained / self.generated), 3),
            "groups": f"{len(groups)} of {self.admitted}",
        }


def main() -> None:
    """Simulate all modes and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("steps", 60), ("groups", 16), ("samples", 8), ("max-lag", 1), ("tokens", 40), ("room", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--step-ticks", type=int, default=40)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the lengths' logarithms")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    modes = {mode: Run(mode, arguments).simulate() for mode in MODES}
    heads = (
        "`on_stale`",
        "samples trained",
        "tokens trained",
        "middle of trained tokens",
        "ticks a step",
        "tokens trained of generated",
    )
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for mode, each in modes.items():
        cells = [
            " / ".join(f"{value:.2f}" for value in each[key]) for key in ("samples", "tokens", "middle_of_trained")
        ]
        print(f"| `{mode}` | {' | '.join(cells)} | {each['ticks_a_step']:.0f} | {each['trained_of_generated']:.2f} |")
    print(json.dumps({"benchmark": "stale_modes", **vars(arguments), "modes": modes}))


if __name__ == "__main__":
    main()
