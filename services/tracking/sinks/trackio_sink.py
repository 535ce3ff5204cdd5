"""Trackio: one run for each segment, in the local database that ``trackio show`` reads (``TRACKIO_DIR``).

Each point has an id of its own, which the database keeps unique. Trackio's page shows a table's cells as text. The report
is an artifact, which is stored once for the same contents.
"""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trackio.cas import stage_blob_into_project
from trackio.sqlite_storage import SQLiteStorage
from trackio.table import Table

from penstock.services.tracking.points import REPORT, TABLE, Point
from penstock.services.tracking.sinks.sink import ROLLOUTS, TrackedRun


class Trackio:
    def __init__(self, run: TrackedRun) -> None:
        self._run = run

    def write(self, points: Sequence[Point], state: Mapping[str, Any]) -> dict[str, Any]:
        for segment in dict.fromkeys(int(point["segment"]) for point in points):
            of_segment = [point for point in points if point["segment"] == segment and REPORT not in point]
            name = self._run.segment(segment)
            SQLiteStorage.bulk_log(
                project=self._run.project,
                run=name,
                metrics_list=[self._metrics(point, name) for point in of_segment],
                steps=[point["step"] for point in of_segment],
                timestamps=[_time(point["at_s"]) for point in of_segment],
                config={"_Group": self._run.id, **self._run.config},
                log_ids=[f"{name}/{point['index']}" for point in of_segment],
            )
        for point in points:
            if REPORT in point:
                self._report(Path(point[REPORT]), self._run.segment(point["segment"]))
        return {}

    def _metrics(self, point: Point, name: str) -> dict[str, Any]:
        if TABLE not in point:
            return dict(point["values"])
        table = Table(columns=point[TABLE]["columns"], data=point[TABLE]["rows"])
        return {ROLLOUTS: table._to_dict(self._run.project, name, point["step"])}

    def _report(self, path: Path, name: str) -> None:
        digest, size = stage_blob_into_project(path, self._run.project)
        SQLiteStorage.commit_artifact_version(
            project=self._run.project,
            name=f"{name}-report",
            type="report",
            description=None,
            manifest=[{"path": path.name, "digest": digest, "size": size}],
            metadata=None,
            aliases=None,
            run_name=name,
            run_id=name,
        )

    def close(self) -> None:
        """Do nothing."""


def _time(at_s: float) -> str:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).isoformat()


def open_sink(run: TrackedRun) -> Trackio:
    return Trackio(run)
