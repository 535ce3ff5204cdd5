"""Every run on this bus over HTTP, and the registration of a new one.

A coordinator leads one run, the one that it was started with. Registering another checks its settings and writes them onto the bus under their
run id; whoever starts services for it starts them with ``--from-bus URL --run-id ID``, a coordinator among them.
"""

import time
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from starlette.exceptions import HTTPException

from services.coordinator.parts import Limit, Parts, page_of, soon
from services.coordinator.problems import Conflict
from services.coordinator.resources import Page, RunSummary
from shared.bus import Argument
from shared.errors import SettingsError
from shared.ledger import read_status
from shared.settings import dumps, loads
from shared.streams import RUN_ID_PATTERN, Keys
from shared.telemetry import tell

_ID = f"^{RUN_ID_PATTERN.pattern}$"
RunId = Annotated[str, Path(pattern=_ID, description="The run.")]
After = Annotated[str | None, Query(pattern=_ID, description="`next` of the page before.")]
_TOML_BODY = {
    "requestBody": {
        "required": True,
        "description": "The run's settings, as in its file; with run.id.",
        "content": {"application/toml": {"schema": {"type": "string"}}},
    }
}


def registry_routes(parts: Parts) -> APIRouter:
    """Return the routes under /v1/runs."""
    router = APIRouter(prefix="/v1/runs", tags=["runs"])

    @router.get("", operation_id="listRuns", summary="Every run on this bus, by id")
    async def runs(cursor: After = None, limit: Limit = 100) -> Page[RunSummary]:
        ids = [run_id for run_id in await soon(_ids(parts)) if cursor is None or run_id > cursor]
        page = page_of(ids, limit, str)
        found = [await soon(_summary(parts, run_id)) for run_id in page.items]
        return Page(items=[one for one in found if one is not None], next=page.next)

    @router.post(
        "",
        operation_id="registerRun",
        summary="Check the settings of a new run and keep them on the bus",
        status_code=201,
        openapi_extra=_TOML_BODY,
    )
    async def register(request: Request, response: Response) -> RunSummary:
        found = await soon(_register(parts, await request.body()))
        response.headers["Location"] = f"/v1/runs/{found.run_id}"
        return found

    @router.get("/{run_id}", operation_id="getRunSummary", summary="One run on this bus")
    async def run(run_id: RunId) -> RunSummary:
        found = await soon(_summary(parts, run_id))
        if found is None:
            raise HTTPException(404, f"expected a run on this bus, found none of the id {run_id}")
        return found

    return router


async def _ids(parts: Parts) -> list[str]:
    found: set[str] = set()

    async def scan() -> None:
        async for key in parts.bus.client.scan_iter(match="penstock:{*}:run", count=1000):
            found.add(key.decode().removeprefix("penstock:{").removesuffix("}:run"))

    await parts.bus.call(scan)
    return sorted(found)


async def _summary(parts: Parts, run_id: str) -> RunSummary | None:
    keys, client = Keys(run_id), parts.bus.client
    raw = await parts.bus.call(lambda: client.hgetall(keys.run))
    if not raw:
        return None
    status = read_status(raw)
    return RunSummary(
        run_id=run_id,
        state=status.state,
        reason=status.reason,
        step=status.step,
        head=status.head,
        created_at_s=status.created_at_s,
        registered=bool(await parts.bus.call(lambda: client.exists(keys.settings))),
        here=run_id == parts.bus.keys.run_id,
    )


async def _register(parts: Parts, body: bytes) -> RunSummary:
    try:
        settings = loads(body.decode(), "request")
    except UnicodeDecodeError as error:
        raise SettingsError(f"expected TOML in UTF-8, found {error.reason} at byte {error.start}") from error
    if not settings.run.id:
        raise SettingsError("request: expected run.id, found none: a run on the bus is found by it")
    keys = Keys(settings.run.id)
    kept = settings.model_copy(update={"bus": settings.bus.model_copy(update={"url": "embedded"})})
    arguments: list[Argument] = [dumps(kept), time.time()]
    if not await parts.bus.script("register", [keys.settings, keys.run], arguments):
        raise Conflict(f"expected an id that no run on this bus has, found {settings.run.id}: change run.id")
    await tell(parts.bus, "api", "run registered", settings.run.id, run=settings.run.id)
    found = await _summary(parts, settings.run.id)
    assert found is not None
    return found
