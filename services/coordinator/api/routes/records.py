"""Training records over HTTP, newest first.

::

    /v1/run/steps      the stream `steps`
    /v1/run/rollouts   groups since the newest checkpoint; before it, a sample from rollouts.jsonl

After a rollback a step's newest report is valid.
"""

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import ValidationError

from services.coordinator.api.dependencies import EntryCursor, Limit, Parts, page_of, soon
from services.coordinator.records import jsonl
from services.coordinator.records.recorder import rollout_line
from services.coordinator.run.monitor import numbers
from services.coordinator.schemas.records import RolloutView, StepView, rollout_view
from services.coordinator.schemas.resources import Page
from shared.bus import wire
from shared.bus.messages import Experience, Json, StepReport
from shared.bus.stores import records
from shared.bus.streams import JOURNAL, STEPS, Row
from shared.errors import MessageError

Few = Annotated[int, Query(ge=1, le=50, description="Maximum number of groups.")]


def record_routes(parts: Parts) -> APIRouter:
    """Return the routes for training records."""
    router = APIRouter(prefix="/v1/run", tags=["run"])

    @router.get("/steps", operation_id="listSteps", summary="The trainer's report of each step, newest first")
    async def steps(cursor: EntryCursor = None, limit: Limit = 100) -> Page[StepView]:
        rows = await soon(records.page(parts.bus, STEPS, cursor, limit + 1))
        page = page_of(rows, limit, lambda row: row[0])
        views = (_step(entry, fields) for entry, fields in page.items)
        return Page(items=[step for step in views if step is not None], next=page.next)

    @router.get("/rollouts", operation_id="listRollouts", summary="Groups that were trained on, newest first")
    async def rollouts(cursor: EntryCursor = None, limit: Few = 5) -> Page[RolloutView]:
        return page_of(await soon(_rollouts(parts, cursor, limit + 1)), limit, lambda rollout: rollout.id)

    return router


def _step(entry: str, fields: Mapping[bytes, bytes]) -> StepView | None:
    try:
        report = wire.decode(fields.get(b"data", b""), StepReport)
    except MessageError:
        return None  # from a newer version
    return StepView(
        id=entry,
        step=report.step,
        version=report.version,
        finished_at_s=report.finished_at_s,
        samples=report.samples,
        lag_counts=dict(report.lag_counts),
        metrics=numbers(report.metrics),
    )


async def _rollouts(parts: Parts, cursor: str | None, count: int) -> list[RolloutView]:
    rollouts = list(_journalled(await records.page(parts.bus, JOURNAL, cursor, count)))
    if len(rollouts) < count:
        before = rollouts[-1].id if rollouts else cursor
        rollouts += await asyncio.to_thread(_recorded, parts.folder / "rollouts.jsonl", before, count - len(rollouts))
    return rollouts


def _journalled(rows: list[Row]) -> Iterator[RolloutView]:
    for entry, fields in rows:
        try:
            experience = wire.decode(fields.get(b"data", b""), Experience)
        except MessageError:
            continue
        yield rollout_view(_finite(rollout_line(entry, int(fields[b"step"]), experience)))


def _recorded(file: Path, before: str | None, count: int) -> list[RolloutView]:
    return list(itertools.islice(_older(file, before), count))


def _older(file: Path, before: str | None) -> Iterator[RolloutView]:
    for line in jsonl.newest_first(file):
        try:
            rollout = rollout_view(_finite(line))
        except (KeyError, ValidationError):
            continue
        if before is None or _place(rollout.id) < _place(before):
            yield rollout


def _place(entry: str) -> tuple[int, int]:
    at_ms, _, number = entry.partition("-")
    return int(at_ms), int(number)


def _finite(line: Mapping[str, Json]) -> dict[str, Json]:
    return {name: jsonl.finite(value) for name, value in line.items()}
