"""Points: what trackers show of a step, an evaluation, a rollout table or the report, under names that users of TRL know.

A step that does not follow the last one begins a segment: the run was rolled back. A table belongs to the segment of the
version that its step made, as a version is never reused.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from penstock.services.tracking.tables import entry_time_s, table_of
from penstock.shared.bus.messages import StepReport

Point: TypeAlias = dict[str, Any]
"""``{"segment": 0, "index": 17, "step": 3, "at_s": 1.5, "values": {"train/reward": 0.5}}``; ``index`` counts a segment's points.
One of a rollout table has it as ``table`` (:data:`penstock.services.tracking.tables.Table`), one of the report its path as ``report``.
"""
TABLE, REPORT = "table", "report"

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
    "episode_turns_mean": "train/episodes/turns",
    "episode_calls_mean": "train/tools/call_frequency",
}
_SCORER, _ENVIRONMENT = "scorer_mean_", "environment_mean_"
_EVALUATED = ("accuracy", "accuracy_low", "accuracy_high", "answered", "turns", "calls")


@dataclasses.dataclass(slots=True)
class Segments:
    """The current segment of a run, and its number of points so far."""

    segment: int = 0
    last_step: int = 0
    points: int = 0
    last_version: int = -1
    """The newest version of a step so far."""
    first_version: int = 0
    earlier: list[Annotated[list[int], Field(min_length=2, max_length=2)]] = dataclasses.field(default_factory=list)
    """The first version of each earlier segment, and its number of points."""

    def of_step(self, report: StepReport) -> Point:
        """Return a step's point; one that does not ascend begins a segment."""
        if report.step <= self.last_step:
            self.earlier.append([self.first_version, self.points])
            self.segment, self.points, self.first_version = self.segment + 1, 0, int(report.version)
        self.last_step, self.last_version = report.step, max(self.last_version, int(report.version))
        metrics = {**report.metrics, "version": float(report.version), "samples": float(report.samples)}
        return self._point(report.step, report.finished_at_s, {name_of(name): metrics[name] for name in metrics})

    def of_evaluation(self, evaluations: Iterable[Mapping[str, Any]]) -> Point:
        """Return the point of a version's evaluation, which has a result for each set."""
        step, at_s, values = 0, 0.0, dict[str, float]()
        for result in evaluations:
            step, at_s = int(result["step"]), float(result["started_at_s"]) + float(result["seconds"])
            name = result.get("set", "heldout")
            values |= {f"eval/{name}/{key}": result[key] for key in _EVALUATED if result.get(key) is not None}
            values |= {f"eval/{name}/ended_{reason}": share for reason, share in result.get("ended", {}).items()}
            values |= {f"eval/{name}/pass_at_{k}": of["value"] for k, of in result.get("pass_at", {}).items()}
        return self._point(step, at_s, values)

    def of_rollout(self, line: Mapping[str, Any]) -> Point:
        """Return the point of a line of ``rollouts.jsonl``. Raises ValueError: it is damaged."""
        table, entry = table_of(line), str(line["entry"])
        segment = self._segment_of(int(line["version"]))
        return {**self._point(int(line["step"]), entry_time_s(entry), {}, segment), TABLE: table}

    def of_report(self, path: Path, at_s: float) -> Point:
        """Return the point of a new ``report.html``."""
        return {**self._point(self.last_step, at_s, {}), REPORT: str(path)}

    def _segment_of(self, version: int) -> int:
        starts = [first for first, _ in self.earlier] + [self.first_version]
        return max((number for number, first in enumerate(starts) if first <= version), default=0)

    def _point(self, step: int, at_s: float, values: Mapping[str, float], segment: int | None = None) -> Point:
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        segment = self.segment if segment is None else segment
        return {"segment": segment, "index": self._next(segment), "step": step, "at_s": at_s, "values": finite}

    def _next(self, segment: int) -> int:
        if segment < self.segment:
            self.earlier[segment][1] += 1
            return self.earlier[segment][1] - 1
        self.points += 1
        return self.points - 1


def name_of(metric: str) -> str:
    """Return a metric's name in trackers.

    >>> name_of("reward_mean"), name_of("scorer_mean_format"), name_of("lag_max")
    ('train/reward', 'train/rewards/format/mean', 'penstock/lag_max')
    """
    if metric.startswith(_SCORER):
        return f"train/rewards/{metric.removeprefix(_SCORER)}/mean"
    if metric.startswith(_ENVIRONMENT):
        return f"train/environment/{metric.removeprefix(_ENVIRONMENT)}/mean"
    return _NAMES.get(metric, f"penstock/{metric}")


def results_of(raw: bytes) -> list[dict[str, Any]]:
    """Return a version's results by set, as the coordinator stored them."""
    decoded = json.loads(raw)
    return decoded if isinstance(decoded, list) else [decoded]
