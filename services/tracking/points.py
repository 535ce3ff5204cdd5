"""Points: what trackers show of a step or an evaluation, under names that users of TRL know.

A step that does not follow the last one begins a segment: the run was rolled back.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from shared.bus.messages import StepReport

Point: TypeAlias = dict[str, Any]
"""``{"segment": 0, "index": 17, "step": 3, "at_s": 1.5, "values": {"train/reward": 0.5}}``; ``index`` counts a segment's points."""

_NAMES = {
    "reward_mean": "train/reward",
    "reward_std": "train/reward_std",
    "reference_kl": "train/kl",
    "entropy": "train/entropy",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "clip_fraction": "train/clip_ratio/region_mean",
    "clip_low_fraction": "train/clip_ratio/low_mean",
    "clip_high_fraction": "train/clip_ratio/high_mean",
    "response_tokens_mean": "train/completions/mean_length",
    "truncated_fraction": "train/completions/clipped_ratio",
    "step_s": "train/step_time",
}
_SCORER = "scorer_mean_"
_EVALUATED = ("accuracy", "accuracy_low", "accuracy_high", "answered")


@dataclasses.dataclass(slots=True)
class Segments:
    """The current segment of a run, and its number of points so far."""

    segment: int = 0
    last_step: int = 0
    points: int = 0

    def of_step(self, report: StepReport) -> Point:
        """Return a step's point; one that does not ascend begins a segment."""
        if report.step <= self.last_step:
            self.segment, self.points = self.segment + 1, 0
        self.last_step = report.step
        metrics = {**report.metrics, "version": float(report.version), "samples": float(report.samples)}
        return self._point(report.step, report.finished_at_s, {name_of(name): metrics[name] for name in metrics})

    def of_evaluation(self, evaluations: Iterable[Mapping[str, Any]]) -> Point:
        """Return the point of a version's evaluation, which has a result for each set."""
        step, at_s, values = 0, 0.0, dict[str, float]()
        for result in evaluations:
            step, at_s = int(result["step"]), float(result["started_at_s"]) + float(result["seconds"])
            name = result.get("set", "heldout")
            values |= {f"eval/{name}/{key}": result[key] for key in _EVALUATED if result.get(key) is not None}
            values |= {f"eval/{name}/pass_at_{k}": of["value"] for k, of in result.get("pass_at", {}).items()}
        return self._point(step, at_s, values)

    def _point(self, step: int, at_s: float, values: Mapping[str, float]) -> Point:
        self.points += 1
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        return {"segment": self.segment, "index": self.points - 1, "step": step, "at_s": at_s, "values": finite}


def name_of(metric: str) -> str:
    """Return a metric's name in trackers.

    >>> name_of("reward_mean"), name_of("scorer_mean_format"), name_of("lag_max")
    ('train/reward', 'train/rewards/format/mean', 'penstock/lag_max')
    """
    if metric.startswith(_SCORER):
        return f"train/rewards/{metric.removeprefix(_SCORER)}/mean"
    return _NAMES.get(metric, f"penstock/{metric}")


def results_of(raw: bytes) -> list[dict[str, Any]]:
    """Return a version's results by set, as the coordinator stored them."""
    decoded = json.loads(raw)
    return decoded if isinstance(decoded, list) else [decoded]
