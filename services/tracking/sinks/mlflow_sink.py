"""MLflow: one run for each segment, on the server of ``MLFLOW_TRACKING_URI``, else in ``<run folder>/mlflow.db``.

A process does not know how much of its first batch its predecessor delivered, so it reads the histories first.
Tables and the report are artifacts, each of which replaces an earlier one of its name.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from penstock.services.tracking.points import REPORT, TABLE, Point
from penstock.services.tracking.sinks.sink import ROLLOUTS, TrackedRun

_RUN, _SEGMENT = "penstock.run", "penstock.segment"
_PARAMETERS_A_CALL = 100
_LONGEST_PARAMETER = 500
_TABLES_TAG = "mlflow.loggedArtifacts"
_TABLES_SHOWN = 100
"""Newest tables of a run that its tag names; a tag has at most 8000 characters."""


class MLflow:
    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        server = os.environ.get("MLFLOW_TRACKING_URI")
        uri = server or f"sqlite:///{run.folder.absolute()}/mlflow.db"
        self._artifacts = None if server else (run.folder.absolute() / "mlflow").as_uri()
        self._client = MlflowClient(uri, registry_uri=uri)
        self._runs: dict[int, str] = {}
        self._first = True

    def write(self, points: Sequence[Point], state: Mapping[str, Any]) -> dict[str, Any]:
        for point in points:
            run_id = self._run_id(int(point["segment"]))
            metrics = [
                Metric(name, value, int(point["at_s"] * 1000), int(point["step"]))
                for name, value in point["values"].items()
            ]
            self._client.log_batch(run_id, metrics=self._missing(run_id, metrics) if self._first else metrics)
        for point in points:
            if TABLE in point:
                self._log_table(self._run_id(int(point["segment"])), point)
            if REPORT in point:
                self._client.log_artifact(self._run_id(int(point["segment"])), point[REPORT])
        self._first = False
        return {}

    def _log_table(self, run_id: str, point: Point) -> None:
        """Write a table in the form of ``MlflowClient.log_table``, which would add a repeated table's rows again."""
        table, name = point[TABLE], f"{ROLLOUTS}/{point['step']:08}.json"
        self._client.log_text(run_id, json.dumps({"columns": table["columns"], "data": table["rows"]}), name)
        logged = json.loads(self._client.get_run(run_id).data.tags.get(_TABLES_TAG, "[]"))
        others = [known for known in logged if known["path"] != name]
        shown = [*others, {"path": name, "type": "table"}][-_TABLES_SHOWN:]
        self._client.set_tag(run_id, _TABLES_TAG, json.dumps(shown))

    def close(self) -> None:
        for run_id in self._runs.values():
            self._client.set_terminated(run_id)

    def _missing(self, run_id: str, metrics: Sequence[Metric]) -> list[Metric]:
        return [metric for metric in metrics if not self._has(run_id, metric)]

    def _has(self, run_id: str, metric: Metric) -> bool:
        history = self._client.get_metric_history(run_id, metric.key)
        return any((known.step, known.timestamp) == (metric.step, metric.timestamp) for known in history)

    def _run_id(self, segment: int) -> str:
        if segment not in self._runs:
            self._runs[segment] = self._find(segment) or self._create(segment)
        return self._runs[segment]

    def _find(self, segment: int) -> str:
        condition = f"tags.`{_RUN}` = '{self._run.id}' and tags.`{_SEGMENT}` = '{segment}'"
        runs = self._client.search_runs([self._experiment()], filter_string=condition)
        return str(runs[0].info.run_id) if runs else ""

    def _create(self, segment: int) -> str:
        tags = {_RUN: self._run.id, _SEGMENT: str(segment)}
        made = self._client.create_run(self._experiment(), tags=tags, run_name=self._run.segment(segment))
        parameters = [Param(key, value[:_LONGEST_PARAMETER]) for key, value in self._run.config.items()]
        for start in range(0, len(parameters), _PARAMETERS_A_CALL):
            self._client.log_batch(made.info.run_id, params=parameters[start : start + _PARAMETERS_A_CALL])
        return str(made.info.run_id)

    def _experiment(self) -> str:
        known = self._client.get_experiment_by_name(self._run.project)
        if known:
            return str(known.experiment_id)
        return str(self._client.create_experiment(self._run.project, artifact_location=self._artifacts))


def open_sink(run: TrackedRun) -> MLflow:
    return MLflow(run)
