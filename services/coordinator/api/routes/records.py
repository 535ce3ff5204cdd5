"""What was trained, over HTTP: the report of each step, and groups to be read with their scores.

::

    /v1/run/steps      the stream `steps`
    /v1/run/rollouts   the journal: every group since the newest checkpoint; before it, rollouts.jsonl: one each few steps

Both are told newest first. A run that was rolled back has several reports of a step; the newest holds.
"""

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import ValidationError

from services.coordinator.api.dependencies import EntryCursor, Limit, Parts, page_of, soon
from services.coordinator.records import jsonl
from services.coordinator.records.recorder import rollout_line
from services.coordinator.run.monitor import numbers
from services.coordinator.schemas.resources import Page
from services.coordinator.schemas.run import ResponseModel
from shared.bus import wire
from shared.bus.messages import Experience, FinishReason, Json, ScoreStatus, StepReport
from shared.bus.stores import records
from shared.bus.streams import JOURNAL, STEPS, Row
from shared.errors import MessageError

Few = Annotated[int, Query(ge=1, le=50, description="At most so many groups.")]


class StepView(ResponseModel):
    """What the trainer reported of one optimizer step."""

    id: str
    """Its place among the reports."""
    step: int
    """Optimizer step."""
    version: int
    """The policy version that it made."""
    finished_at_s: float
    """When it was committed, Unix time."""
    samples: int
    """Samples that it trained on."""
    lag_counts: dict[str, int]
    """Those samples by lag in steps."""
    metrics: dict[str, float | None]
    """What was measured; docs/reference/metrics.md has every name. Null: not finite."""


class ScoreView(ResponseModel):
    """What one scorer said of a completion."""

    status: ScoreStatus
    """ok, or why there is no value."""
    value: float | None
    """Its value; null where there is none."""
    detail: str
    """What it found, for people."""


class CompletionView(ResponseModel):
    """One completion of a group."""

    text: str
    """What the policy wrote."""
    reward: float | None
    """Its reward; null: not finite."""
    scores: dict[str, ScoreView]
    """What each scorer said, by name."""
    tokens: int
    """Its length."""
    finish_reason: FinishReason
    """Why it ended."""
    versions: list[int]
    """The policy versions that wrote it."""


class Turn(ResponseModel):
    """One message of a conversation."""

    role: str
    """Who speaks."""
    content: Any
    """What is said."""


class RolloutView(ResponseModel):
    """A group that was trained on: a problem and its completions."""

    id: str
    """Its place in the journal."""
    step: int
    """The optimizer step that used it."""
    group: int
    """The group's number."""
    problem: str
    """The problem's name in the dataset."""
    prompt: str | list[Turn] | None
    """What was asked: text, or a conversation."""
    answer: str | None
    """The reference answer, where there is one."""
    replica: str
    """Who generated it."""
    completions: list[CompletionView]
    """Its samples."""


def record_routes(parts: Parts) -> APIRouter:
    """Return the routes of what was trained."""
    router = APIRouter(prefix="/v1/run", tags=["run"])

    @router.get("/steps", operation_id="listSteps", summary="What the trainer reported of each step, newest first")
    async def steps(cursor: EntryCursor = None, limit: Limit = 100) -> Page[StepView]:
        rows = await soon(records.page(parts.bus, STEPS, cursor, limit + 1))
        page = page_of(rows, limit, lambda row: row[0])
        found = (_step(entry, fields) for entry, fields in page.items)
        return Page(items=[step for step in found if step is not None], next=page.next)

    @router.get("/rollouts", operation_id="listRollouts", summary="Groups that were trained on, newest first")
    async def rollouts(cursor: EntryCursor = None, limit: Few = 5) -> Page[RolloutView]:
        return page_of(await soon(_rollouts(parts, cursor, limit + 1)), limit, lambda found: found.id)

    return router


def _step(entry: str, fields: Mapping[bytes, bytes]) -> StepView | None:
    try:
        report = wire.decode(fields.get(b"data", b""), StepReport)
    except MessageError:
        return None  # of a version to come
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
    found = list(_journalled(await records.page(parts.bus, JOURNAL, cursor, count)))
    if len(found) < count:
        before = found[-1].id if found else cursor
        found += await asyncio.to_thread(_recorded, parts.folder / "rollouts.jsonl", before, count - len(found))
    return found


def _journalled(rows: list[Row]) -> Iterator[RolloutView]:
    for entry, fields in rows:
        try:
            experience = wire.decode(fields.get(b"data", b""), Experience)
        except MessageError:
            continue  # of a version to come
        yield _rollout(rollout_line(entry, int(fields[b"step"]), experience))


def _recorded(file: Path, before: str | None, count: int) -> list[RolloutView]:
    return list(itertools.islice(_older(file, before), count))


def _older(file: Path, before: str | None) -> Iterator[RolloutView]:
    for line in jsonl.newest_first(file):
        try:
            found = _rollout(line)
        except (KeyError, ValidationError):
            continue  # of another version
        if before is None or _place(found.id) < _place(before):
            yield found


def _place(entry: str) -> tuple[int, int]:
    at_ms, _, number = entry.partition("-")
    return int(at_ms), int(number)


def _rollout(line: Mapping[str, Json]) -> RolloutView:
    return RolloutView.model_validate({**jsonl.finite(dict(line)), "id": line["entry"]})  # type: ignore[dict-item]
