"""Trackio: one run for each segment, in the local database that ``trackio show`` reads (``TRACKIO_DIR``).

Each point has an id of its own, which the database keeps unique.
"""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from trackio.sqlite_storage import SQLiteStorage

from services.tracking.points import Point
from services.tracking.sinks.sink import TrackedRun


class Trackio:
    def __init__(self, run: TrackedRun) -> None:
        self._run = run

    def write(self, points: Sequence[Point], state: Mapping[str, Any]) -> dict[str, Any]:
        for segment in dict.fromkeys(int(point["segment"]) for point in points):
            of_segment = [point for point in points if point["segment"] == segment]
            name = self._run.segment(segment)
            SQLiteStorage.bulk_log(
                project=self._run.project,
                run=name,
                metrics_list=[point["values"] for point in of_segment],
                steps=[point["step"] for point in of_segment],
                timestamps=[_time(point["at_s"]) for point in of_segment],
                config={"_Group": self._run.id, **self._run.config},
                log_ids=[f"{name}/{point['index']}" for point in of_segment],
            )
        return {}

    def close(self) -> None:
        """Do nothing."""


def _time(at_s: float) -> str:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).isoformat()


def open_sink(run: TrackedRun) -> Trackio:
    return Trackio(run)
