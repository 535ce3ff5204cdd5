"""The run over HTTP: view, commands, settings and operations."""

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Response
from starlette.exceptions import HTTPException

from penstock.services.coordinator.api.dependencies import EntryCursor, Limit, Parts, page_of, soon
from penstock.services.coordinator.schemas.resources import (
    LiveSettings,
    LiveValues,
    OperationView,
    Page,
    RevisionView,
    SettingsChange,
    StateView,
)
from penstock.services.coordinator.schemas.run import Command, Pause, RunChange, RunView
from penstock.shared.bus.messages import Json
from penstock.shared.bus.stores.policy.ledger import RunState
from penstock.shared.bus.stores.replicas.live_settings import Revision
from penstock.shared.bus.stores.run.operations import Operation
from penstock.shared.bus.streams import HISTORY
from penstock.shared.process.telemetry import tell

Number = Annotated[int, Path(ge=1, le=2**53, description="The operation's number.")]
NumberCursor = Annotated[str | None, Query(pattern=r"^[0-9]{1,15}$", description="`next` of the page before.")]


def run_view(text: Callable[[], Awaitable[bytes]]) -> APIRouter:
    """Return the route of the run's view, of which ``text`` returns the JSON."""
    router = APIRouter(prefix="/v1/run", tags=["run"])

    @router.get("", operation_id="getRun", summary="The run, now", response_model=RunView)
    async def get_run() -> Response:
        return Response(await soon(text()), media_type="application/json")

    return router


def run_routes(parts: Parts) -> APIRouter:
    router = run_view(parts.monitor.text)

    @router.get("/history", operation_id="listStates", summary="Every state of the run with its reason, newest first")
    async def states(cursor: EntryCursor = None, limit: Limit = 100) -> Page[StateView]:
        return await soon(_states(parts, cursor, limit))

    @router.post("/start", operation_id="startRun", summary="Start a run that was created")
    async def start(command: Command | None = None) -> RunChange:
        return await soon(_steer(parts, "start", command))

    @router.post(
        "/pause",
        operation_id="pauseRun",
        summary="Stop admission; groups in flight finish",
        responses={202: {"model": OperationView, "description": "With `mode` `drain`: what to poll."}},
    )
    async def pause(response: Response, command: Pause | None = None) -> RunChange | OperationView:
        changed = await soon(_steer(parts, "pause", command))
        if command is None or command.mode == "admission":
            return changed
        return accepted(response, await soon(parts.operations.begin("pause", "draining", {"mode": "drain"})))

    @router.post("/resume", operation_id="resumeRun", summary="Resume the run exactly where it was paused")
    async def resume(command: Command | None = None) -> RunChange:
        return await soon(_steer(parts, "resume", command))

    @router.post("/stop", operation_id="stopRun", summary="End the run now; groups in flight are dropped and counted")
    async def stop(command: Command | None = None) -> RunChange:
        return await soon(_steer(parts, "stop", command))

    return router


async def _steer(parts: Parts, name: str, command: Command | None) -> RunChange:
    changed, state, reason = await parts.steering.command(name, command.reason if command is not None else "")
    return RunChange(state=state, changed=changed, reason=reason)


async def _states(parts: Parts, cursor: str | None, limit: int) -> Page[StateView]:
    page = page_of(await parts.newest_first(HISTORY, cursor, limit), limit, lambda row: row[0])
    return Page(items=list(_readable(page.items)), next=page.next)


def _readable(rows: Sequence[tuple[str, dict[str, str]]]) -> Iterator[StateView]:
    for entry, fields in rows:
        with contextlib.suppress(KeyError, ValueError):  # not written by a process of the run
            yield StateView(
                id=entry,
                at_s=float(fields["at_s"]),
                before=RunState(fields["from"] or "created"),
                state=RunState(fields["to"]),
                reason=fields["reason"],
                step=int(fields["step"]),
            )


# ---------------------------------------------------------------- settings


def settings_routes(parts: Parts) -> APIRouter:
    """Return the routes under /v1/run/settings."""
    router = APIRouter(prefix="/v1/run/settings", tags=["settings"])

    @router.get("", operation_id="getSettings", summary="The settings that may change during the run")
    async def get_settings(response: Response) -> LiveSettings:
        return _tagged(response, await soon(_settings(parts)))

    @router.patch("", operation_id="changeSettings", summary="Change settings during the run")
    async def change_settings(
        response: Response,
        change: SettingsChange,
        if_match: Annotated[str | None, Header(description="The `ETag` of the revision to change.")] = None,
    ) -> LiveSettings:
        if if_match is None:
            raise HTTPException(428, "the request needs an If-Match header with the ETag of GET /v1/run/settings")
        return _tagged(response, await soon(_change(parts, change, if_match)))

    @router.get("/history", operation_id="listRevisions", summary="Every change of the settings, newest first")
    async def revisions(cursor: NumberCursor = None, limit: Limit = 100) -> Page[RevisionView]:
        newest = await soon(parts.live.newest())
        first = min(newest, int(cursor) - 1) if cursor else newest
        numbers = range(first, max(0, first - limit - 1), -1)
        stored = [revision for number in numbers if (revision := await soon(parts.live.read(number))) is not None]
        return page_of([_revision(entry) for entry in stored], limit, lambda entry: str(entry.revision))

    return router


async def _settings(parts: Parts) -> LiveSettings:
    await parts.live.refresh()
    newest = await parts.live.read(parts.live.revision)
    return LiveSettings(
        revision=parts.live.revision,
        values=LiveValues.model_validate(parts.live.values()),
        reason="" if newest is None else newest.reason,
        step=0 if newest is None else newest.step,
        at_s=None if newest is None else newest.at_s,
    )


async def _change(parts: Parts, change: SettingsChange, if_match: str) -> LiveSettings:
    changes: dict[str, Json] = change.changes.model_dump(by_alias=True, exclude_unset=True)
    if not changes:
        raise HTTPException(422, "changes must name at least one setting")
    expected = await parts.live.newest()
    if if_match != f'"{expected}"':
        raise HTTPException(412, f'expected If-Match: "{expected}", found {if_match}: read the settings again')
    made = await parts.live.change(expected, changes, change.reason)
    if made is None:
        raise HTTPException(412, f"expected revision {expected}, found a newer one: read the settings again")
    parts.changed()
    detail = f"revision {made.revision}, asked for at step {made.step}" + (
        f": {change.reason}" if change.reason else ""
    )
    await tell(parts.bus, "api", "settings changed", detail, revision=made.revision, step=made.step, changes=changes)
    return await _settings(parts)


def _tagged(response: Response, settings: LiveSettings) -> LiveSettings:
    response.headers["ETag"] = f'"{settings.revision}"'
    return settings


def _revision(revision: Revision) -> RevisionView:
    return RevisionView.model_validate(dataclasses.asdict(revision))


# ---------------------------------------------------------------- operations


def operation_routes(parts: Parts) -> APIRouter:
    """Return the routes under /v1/operations."""
    router = APIRouter(prefix="/v1/operations", tags=["operations"])

    @router.get("", operation_id="listOperations", summary="Long-running commands, newest first")
    async def operations(cursor: NumberCursor = None, limit: Limit = 100) -> Page[OperationView]:
        matching = [
            record for record in await soon(parts.operations.all()) if cursor is None or record.id < int(cursor)
        ]
        return page_of([view_of(record) for record in matching], limit, lambda record: str(record.id))

    @router.get("/{number}", operation_id="getOperation", summary="One long-running command")
    async def operation(number: Number) -> OperationView:
        record = await soon(parts.operations.get(number))
        if record is None:
            raise HTTPException(404, f"this run has no operation {number}")
        return view_of(record)

    return router


def view_of(operation: Operation) -> OperationView:
    return OperationView.model_validate(dataclasses.asdict(operation))


def accepted(response: Response, operation: Operation) -> OperationView:
    """Answer 202 with the operation to poll."""
    response.status_code = 202
    response.headers["Location"] = f"/v1/operations/{operation.id}"
    return view_of(operation)
