"""Weights & Biases: one run for each segment, grouped by the run's id.

The client keeps rows in memory and loses them when it is killed, so each batch is a session: ``finish`` returns once
its rows are uploaded, or in their file with ``WANDB_MODE=offline``. Rows have their index as step: a session that comes
again resumes the run, and the client drops the steps that the server has.
Tables are rows, too. The report is an artifact, of which the server stores the same contents once. Files that wait for
their upload are in the run's folder, where ``wandb sync`` finds those of an offline session.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from penstock.services.tracking.points import REPORT, TABLE, Point
from penstock.services.tracking.sinks.sink import ROLLOUTS, TrackedRun

_STEP = "train/global_step"


class WeightsAndBiases:
    """Write each batch as a session of a resumed run."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        os.environ.setdefault("WANDB_DATA_DIR", str(run.folder.absolute() / "wandb"))

    def write(self, points: Sequence[Point], state: Mapping[str, Any]) -> dict[str, Any]:
        for segment in dict.fromkeys(int(point["segment"]) for point in points):
            self._log(segment, [point for point in points if point["segment"] == segment])
        return {}

    def close(self) -> None:
        """Do nothing: every session is finished."""

    def _log(self, segment: int, points: Sequence[Point]) -> None:
        name = self._run.segment(segment)
        folder = self._run.folder / "wandb" / f"{segment}-{points[0]['index']:08}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        session = wandb.init(
            project=self._run.project,
            id=name,
            name=name,
            group=self._run.id,
            config=dict(self._run.config),
            dir=str(folder),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        session.define_metric("*", step_metric=_STEP)
        for point in points:
            if REPORT in point:
                session.log_artifact(point[REPORT], name=f"{name}-report", type="report")
            else:
                session.log({**_row(point), _STEP: point["step"]}, step=point["index"])
        session.finish()


def _row(point: Point) -> dict[str, Any]:
    if TABLE not in point:
        return dict(point["values"])
    return {ROLLOUTS: wandb.Table(columns=point[TABLE]["columns"], data=point[TABLE]["rows"])}


def open_sink(run: TrackedRun) -> WeightsAndBiases:
    return WeightsAndBiases(run)
