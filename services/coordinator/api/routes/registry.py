"""Runs on this bus over HTTP, and registration of others (docs/api.md, "Runs")."""

import dataclasses
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from starlette.exceptions import HTTPException

from penstock.services.coordinator.api.dependencies import Limit, Parts, page_of, soon
from penstock.services.coordinator.api.errors import Conflict
from penstock.services.coordinator.schemas.resources import Page, RunSummary
from penstock.shared.bus.keys import RUN_ID_PATTERN
from penstock.shared.bus.stores.run.registry import Registry
from penstock.shared.errors import SettingsError
from penstock.shared.process.telemetry import tell
from penstock.shared.settings import dumps, loads

_MOST_REGISTERED = 256
"""Registered runs on the bus."""
_LARGEST_BYTES = 128 * 1024
_ID = f"^{RUN_ID_PATTERN.pattern}$"
RunId = Annotated[str, Path(pattern=_ID, description="The run.")]
After = Annotated[str | None, Query(pattern=_ID, description="`next` of the page before.")]
_TOML_BODY = {
    "requestBody": {
        "required": True,
        "description": "The run's settings as TOML, with run.id.",
        "content": {"application/toml": {"schema": {"type": "string"}}},
    }
}


def registry_routes(parts: Parts) -> APIRouter:
    """Return the routes under /v1/runs."""
    router = APIRouter(prefix="/v1/runs", tags=["runs"])

    @router.get("", operation_id="listRuns", summary="Every run on this bus, by id")
    async def runs(cursor: After = None, limit: Limit = 100) -> Page[RunSummary]:
        ids = [run_id for run_id in await soon(Registry(parts.bus).runs()) if cursor is None or run_id > cursor]
        page = page_of(ids, limit, str)
        summaries = [await soon(_summary(parts, run_id)) for run_id in page.items]
        return Page(items=[summary for summary in summaries if summary is not None], next=page.next)

    @router.post(
        "",
        operation_id="registerRun",
        summary="Check the settings of a new run and keep them on the bus",
        status_code=201,
        openapi_extra=_TOML_BODY,
    )
    async def register(request: Request, response: Response) -> RunSummary:
        summary = await soon(_register(parts, await request.body()))
        response.headers["Location"] = f"/v1/runs/{summary.run_id}"
        return summary

    @router.delete(
        "/{run_id}",
        operation_id="deleteRun",
        summary="Delete a registered run and its data from the bus",
        status_code=204,
    )
    async def delete(run_id: RunId) -> None:
        await soon(_delete(parts, run_id))

    @router.get("/{run_id}", operation_id="getRunSummary", summary="One run on this bus")
    async def run(run_id: RunId) -> RunSummary:
        summary = await soon(_summary(parts, run_id))
        if summary is None:
            raise HTTPException(404, f"no run on this bus has the id {run_id}")
        return summary

    return router


async def _summary(parts: Parts, run_id: str) -> RunSummary | None:
    known = await Registry(parts.bus).status(run_id)
    if known is None:
        return None
    status, registered = known
    about = {"run_id": run_id, "registered": registered, "here": run_id == parts.bus.run_id}
    return RunSummary.model_validate({**dataclasses.asdict(status), **about})


async def _delete(parts: Parts, run_id: str) -> None:
    summary = await _summary(parts, run_id)
    if summary is None:
        raise HTTPException(404, f"no run on this bus has the id {run_id}")
    registry = Registry(parts.bus)
    if summary.here:
        raise Conflict(f"a coordinator cannot delete its own run, {run_id}")
    if not summary.registered:
        raise Conflict(f"{run_id} was not registered over HTTP: it stays on the bus")
    if working := await registry.working(run_id):
        raise Conflict(f"run {run_id} has working services ({working}): stop them first")
    if not await registry.delete(run_id):
        raise Conflict(f"run {run_id} is running or paused: stop it first")
    await tell(parts.bus, "api", "run deleted", run_id, run=run_id)


async def _register(parts: Parts, body: bytes) -> RunSummary:
    if len(body) > _LARGEST_BYTES:
        raise HTTPException(413, f"expected settings of at most {_LARGEST_BYTES} bytes, found {len(body)}")
    try:
        settings = loads(body.decode(), "request")
    except UnicodeDecodeError as error:
        raise SettingsError(f"expected TOML in UTF-8, found {error.reason} at byte {error.start}") from error
    if not settings.run.id:
        raise SettingsError("request: run.id is missing: runs on a bus are identified by it")
    registry = Registry(parts.bus)
    registered = await registry.registered()
    if settings.run.id not in registered and len(registered) >= _MOST_REGISTERED:
        raise Conflict(
            f"expected at most {_MOST_REGISTERED} registered runs on this bus, and the limit is reached: delete one (DELETE /v1/runs/ID)"
        )
    kept = settings.model_copy(update={"bus": settings.bus.model_copy(update={"url": "embedded"})})
    if not await registry.register(settings.run.id, dumps(kept)):
        raise Conflict(f"a run with the id {settings.run.id} exists on this bus: change run.id")
    await tell(parts.bus, "api", "run registered", settings.run.id, run=settings.run.id)
    summary = await _summary(parts, settings.run.id)
    assert summary is not None
    return summary
