"""Training records over HTTP, newest first.

::

    /v1/run/steps      the stream `steps`
    /v1/run/curves     metrics.jsonl, in buckets
    /v1/run/memory     the stream `memory`
    /v1/run/rollouts   groups since the newest checkpoint; before it, a sample from rollouts.jsonl
    …/{entry}/tokens   the trainer's record of a group's tokens (``shared.files.token_records``)

After a rollback a step's newest report is valid.
"""

import asyncio
import dataclasses
import functools
import itertools
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from penstock.services.coordinator.api.dependencies import ENTRY, EntryCursor, Limit, Rows, soon, views_of
from penstock.services.coordinator.records import jsonl
from penstock.services.coordinator.records.curves import Curves
from penstock.services.coordinator.records.recorder import journal_line
from penstock.services.coordinator.run.monitor import numbers
from penstock.services.coordinator.schemas.records import (
    CurvesView,
    MarkView,
    MemoryView,
    RolloutView,
    StepView,
    TokensView,
    rollout_view,
    tokens_view,
)
from penstock.services.coordinator.schemas.records import excerpt as of_group
from penstock.services.coordinator.schemas.resources import Page
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, Json, MemoryReport, StepReport
from penstock.shared.bus.streams import JOURNAL, MEMORY, STEPS, Row, count_in
from penstock.shared.errors import MessageError
from penstock.shared.files.token_records import read_record, record_path

Points = Annotated[int, Query(ge=2, le=1000, description="Maximum number of buckets.")]
From = Annotated[int | None, Query(alias="from", ge=0, le=2**53, description="First step. Default: the run's first.")]
To = Annotated[int | None, Query(alias="to", ge=0, le=2**53, description="Last step. Default: the newest.")]
Few = Annotated[int, Query(ge=1, le=50, description="Maximum number of groups.")]


Text = Annotated[str, Query(max_length=1000)]
UpTo = Annotated[int | None, Query(ge=0, le=2**53, description="Groups that this step or an earlier one trained.")]
Excerpt = Annotated[
    int | None, Query(ge=1, le=100_000, description="Characters of each completion: around `search`, else its end.")
]
GroupId = Annotated[str, Path(pattern=ENTRY, description="The group's `id`.")]
Place = Annotated[int, Query(ge=0, le=2**53)]
ManyTokens = Annotated[int, Query(ge=1, le=10_000, description="Maximum number of tokens.")]
Groups = Callable[[str | None, int], Awaitable[Page[RolloutView]]]
Trained = Callable[[str | None, int], Awaitable[list[Row]]]
_SEARCHED, _AT_ONCE = 1000, 50
"""Groups that one request examines; its `next` continues after them."""
_SEARCH_S = 1.0
"""After which it examines no further ones."""
_SHORT = 100_000
"""Characters of a group that is searched on the event loop."""
_MOST_CHARACTERS = 8 << 20
"""Of the completions and turns of one page, which has fewer groups if they are long; a group is never divided."""
_READING = threading.Lock()
_OF_ANOTHER = (KeyError, TypeError, ValidationError)
"""Raised by records of another version."""


def record_routes(rows: Rows, trained: Trained, folder: FilePath) -> APIRouter:
    """Return the routes for training records. ``trained``: rows of the journal with their groups, before a cursor."""
    router = APIRouter(prefix="/v1/run", tags=["run"])
    file, groups = folder / "rollouts.jsonl", functools.partial(_rollouts, trained, folder)
    curves, reading = functools.cache(lambda: Curves(folder)), threading.Lock()

    @router.get("/steps", operation_id="listSteps", summary="The trainer's report of each step, newest first")
    async def steps(cursor: EntryCursor = None, limit: Limit = 100) -> Page[StepView]:
        return await views_of(rows, STEPS, StepReport, _step, cursor, limit)

    @router.get(
        "/curves",
        operation_id="getCurves",
        summary="Every metric over the whole run or a range of steps, in buckets with minimum, maximum and last value",
        response_model=CurvesView,
    )
    async def of_range(points: Points = 240, first: From = None, last: To = None) -> Response:
        def text() -> str:
            with reading:
                return _curves(curves(), points, first, last)

        return Response(await soon(asyncio.to_thread(text)), media_type="application/json")

    @router.get("/memory", operation_id="listMemory", summary="What each process held on its device, newest first")
    async def memory(cursor: EntryCursor = None, limit: Limit = 100) -> Page[MemoryView]:
        return await views_of(rows, MEMORY, MemoryReport, _memory, cursor, limit)

    @router.get("/rollouts", operation_id="listRollouts", summary="Groups that were trained on, newest first")
    async def rollouts(
        cursor: EntryCursor = None,
        limit: Few = 5,
        search: Text = "",
        problem: Text = "",
        step: UpTo = None,
        excerpt: Excerpt = None,
    ) -> Page[RolloutView]:
        sought = search.casefold()
        if step is not None and cursor is None:
            cursor = await soon(_after_step(rows, file, step))
        if search or problem:
            page = await soon(_matching(groups, cursor, limit, sought, problem))
        else:
            page = await soon(groups(cursor, limit))
        items = page.items if excerpt is None else [of_group(group, excerpt, sought) for group in page.items]
        return Page(items=items, next=page.next)

    _add_group(router, folder, groups)
    return router


def _add_group(router: APIRouter, folder: FilePath, groups: Groups) -> None:
    @router.get("/rollouts/{entry}", operation_id="getRollout", summary="One group that was trained on")
    async def rollout(entry: GroupId) -> RolloutView:
        return await soon(_group(groups, entry))

    @router.get(
        "/rollouts/{entry}/tokens",
        operation_id="listRolloutTokens",
        summary="A completion's tokens: texts, logprobs of engine and trainer, versions",
    )
    async def tokens(entry: GroupId, completion: Place = 0, first: Place = 0, limit: ManyTokens = 1000) -> TokensView:
        return await soon(_tokens(folder, await soon(_group(groups, entry)), completion, first, limit))


async def _group(groups: Groups, entry: str) -> RolloutView:
    at_ms, number = _place(entry)
    for group in (await groups(f"{at_ms}-{number + 1}", 1)).items:
        if group.id == entry:
            return group
    raise HTTPException(404, f"no group {entry} is recorded")


async def _tokens(folder: FilePath, group: RolloutView, completion: int, first: int, limit: int) -> TokensView:
    if completion >= len(group.completions):
        raise HTTPException(404, f"group {group.id} has no completion {completion}: it has {len(group.completions)}")

    def values() -> TokensView:
        with _READING:  # a long completion takes much memory
            recorded = read_record(folder, -1 if group.version is None else group.version, group.group, completion)
            return tokens_view(next(recorded, None), first, limit)

    try:
        return await asyncio.to_thread(values)
    except _OF_ANOTHER:
        every = "one group every coordinator.sample_every_steps steps"
        raise HTTPException(404, f"no tokens of group {group.id} are recorded: {every} has them") from None


def _curves(curves: Curves, points: int, first: int | None, last: int | None) -> str:
    whole = curves.catch_up()
    view = curves.view(points, first, last)
    marks = [MarkView.model_validate(mark).model_dump() for mark in view["marks"]]
    return json.dumps({**view, "whole": whole, "marks": marks}, separators=(",", ":"))


def _step(entry: str, report: StepReport) -> StepView:
    return StepView.model_validate({"id": entry, **dataclasses.asdict(report), "metrics": numbers(report.metrics)})


def _memory(entry: str, report: MemoryReport) -> MemoryView:
    return MemoryView.model_validate({"id": entry, **dataclasses.asdict(report)})


async def _rollouts(trained: Trained, folder: FilePath, cursor: str | None, limit: int) -> Page[RolloutView]:
    """Return groups of the journal, then of the file. They are read one by one if they are long: decoding and their texts
    take memory and time."""
    rollouts, room, many, before, is_more = list[RolloutView](), _MOST_CHARACTERS, 1, cursor, True
    while is_more and len(rollouts) <= limit and room > 0:
        read = await trained(before, many)
        decoded = await asyncio.to_thread(_journalled, read)
        rollouts += decoded
        before, is_more = (read[-1][0] if read else before), len(read) == many
        room -= sum(map(_characters, decoded))
        nbytes = sum(len(fields.get(b"data", b"")) for _, fields in read)
        many = max(1, min(limit + 1 - len(rollouts), room * many // max(1, nbytes)))
    if len(rollouts) <= limit and room > 0:
        last = rollouts[-1].id if rollouts else cursor  # what the journal has and cannot be decoded is in the file
        of_file = (folder / "rollouts.jsonl", last, limit + 1 - len(rollouts), room)
        rollouts += await asyncio.to_thread(_recorded, *of_file)
    items = rollouts[:limit]
    await asyncio.to_thread(_note_tokens, items, folder)
    is_cut = len(rollouts) > limit or sum(map(_characters, items)) >= _MOST_CHARACTERS
    return Page(items=items, next=items[-1].id if is_cut else None)


def _characters(rollout: RolloutView) -> int:
    return sum(each.characters + sum(len(turn.content) for turn in each.turns) for each in rollout.completions)


def _note_tokens(rollouts: Sequence[RolloutView], folder: FilePath) -> None:
    for each in rollouts:
        each.has_tokens = each.version is not None and record_path(folder, each.version, each.group).is_file()


async def _after_step(rows: Rows, file: FilePath, step: int) -> str:
    """Return a cursor after the newest group that ``step`` or an earlier one trained; after all groups without one."""
    cursor: str | None = None
    while page := await rows(JOURNAL, cursor, _AT_ONCE):
        for entry, fields in page:
            if 0 <= count_in(fields, b"step") <= step:
                at_ms, number = _place(entry)
                return f"{at_ms}-{number + 1}"
        cursor = page[-1][0]
    newest = await asyncio.to_thread(jsonl.newest_up_to, file, step)
    return "1-0" if newest is None else f"{newest[0]}-{newest[1] + 1}"


async def _matching(groups: Groups, cursor: str | None, limit: int, search: str, problem: str) -> Page[RolloutView]:
    """Return the groups of ``problem``, if given, with ``search`` in a text of theirs."""
    matching: list[RolloutView] = []
    until_s, examined = time.monotonic() + _SEARCH_S, 0

    def matches(rollout: RolloutView) -> bool:
        return problem in ("", rollout.row_id, rollout.problem) and search in _text(rollout)

    while examined < _SEARCHED and time.monotonic() < until_s:
        page = await groups(cursor, _AT_ONCE)
        for rollout in page.items:
            cursor = rollout.id
            if await asyncio.to_thread(matches, rollout) if _characters(rollout) > _SHORT else matches(rollout):
                matching.append(rollout)
            if len(matching) == limit:
                return Page(items=matching, next=cursor)
        examined += len(page.items)
        if page.next is None:
            return Page(items=matching, next=None)
    return Page(items=matching, next=cursor)


def _text(rollout: RolloutView) -> str:
    """Return prompt, answer and completions, for a search without regard to case."""
    prompt = rollout.prompt if isinstance(rollout.prompt, list) else []
    turns = [str(turn.content) for turn in prompt] or [str(rollout.prompt or "")]
    texts = [*turns, rollout.answer or ""]
    for completion in rollout.completions:
        texts += [completion.text, *(turn.content for turn in completion.turns)]
    return "\n".join(texts).casefold()


def _journalled(rows: list[Row]) -> list[RolloutView]:
    rollouts: list[RolloutView] = []
    for entry, fields in rows:
        try:
            experience = wire.decode(fields.get(b"data", b""), Experience)
        except MessageError:
            continue
        rollouts.append(rollout_view(_finite(journal_line(entry, fields, experience))))
    return rollouts


def _recorded(file: FilePath, before: str | None, count: int, room: int) -> list[RolloutView]:
    """Return ``count`` groups, or fewer that have ``room`` characters."""
    rollouts: list[RolloutView] = []
    for rollout in itertools.islice(_older(file, before), count):
        rollouts.append(rollout)
        room -= _characters(rollout)
        if room <= 0:
            break
    return rollouts


def _older(file: FilePath, before: str | None) -> Iterator[RolloutView]:
    for line in jsonl.newest_first(file, None if before is None else _place(before)):
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
