"""The HTTP API: look at the run, steer it, and let Kubernetes and Prometheus look at the coordinator.

::

    GET  /v1/run                          the live view              POST /v1/run/{start,pause,resume,stop}
    GET  /v1/policies[/{version}]         the history                GET  /healthz  /readyz  /metrics
    POST /v1/policies/{version}/rollback  202                        GET  /v1/rollback
    GET  /v1/services                     who is there

Commands are idempotent: repeating one changes nothing and answers 200; one that does not fit the run's state answers 409
with a sentence. Every error is `application/problem+json` (RFC 9457). This file wraps FastAPI; what is answered lies in
``models``, and the run is led by ``lifecycle``.
"""

import asyncio
import dataclasses
import http
import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from fastapi import APIRouter, FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from starlette.exceptions import HTTPException

from services.coordinator.models import (
    Command,
    Health,
    PolicyView,
    Problem,
    Readiness,
    RollbackView,
    RunChange,
    RunView,
    ServiceView,
)
from services.coordinator.monitor import Monitor, numbers
from services.coordinator.rollback import OVER, Refused, Rollback, Rollbacks
from shared.bus import Bus
from shared.ledger import Ledger, RunState
from shared.messages import PolicyRecord, PolicyVersion
from shared.telemetry import Status, heartbeats, tell

log = logging.getLogger(__name__)

R = TypeVar("R")
_ANSWER_WITHIN_S = 5.0
"""How long a request waits for the bus."""
_PROBLEM = "application/problem+json"
Version = Annotated[int, Path(ge=0, description="The version's number.")]


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """One command: where it leads, from which states, and what to say where it does not fit."""

    to: RunState
    allowed: tuple[RunState, ...]
    refusals: dict[RunState, str]


_OVER = {
    RunState.STOPPED: "the run was stopped; start a new one",
    RunState.FINISHED: "the run has finished; start a new one",
}
ORDERS = {
    "start": Order(
        RunState.RUNNING, (RunState.CREATED,), {**_OVER, RunState.PAUSED: "the run is paused; POST /v1/run/resume"}
    ),
    "pause": Order(
        RunState.PAUSED,
        (RunState.RUNNING,),
        {**_OVER, RunState.CREATED: "the run has not started; there is nothing to pause"},
    ),
    "resume": Order(
        RunState.RUNNING,
        (RunState.PAUSED,),
        {**_OVER, RunState.CREATED: "the run has not started; POST /v1/run/start"},
    ),
    "stop": Order(RunState.STOPPED, (RunState.CREATED, RunState.RUNNING, RunState.PAUSED), _OVER),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What the API is handed. ``changed`` is called after each command that changed the run."""

    bus: Bus
    ledger: Ledger
    monitor: Monitor
    status: Status
    rollbacks: Rollbacks
    changed: Callable[[], None]


def make_app(parts: Parts) -> FastAPI:
    """Return the API over ``parts``."""
    app = FastAPI(
        title="Penstock coordinator",
        summary="Look at a run, steer it, and read the history of its policy.",
        version="1",
        docs_url="/docs",
        redoc_url=None,
        responses={"default": {"model": Problem, "content": {_PROBLEM: {}}, "description": "An error, in a sentence."}},
    )
    app.include_router(_run_routes(parts))
    app.include_router(_history_routes(parts))
    app.include_router(_rollback_routes(parts))
    app.include_router(_health_routes(parts))
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(TimeoutError, _bus_away)
    app.add_exception_handler(Exception, _bug)
    return app


async def _soon(work: Awaitable[R]) -> R:
    async with asyncio.timeout(_ANSWER_WITHIN_S):
        return await work


# ---------------------------------------------------------------- routes


def _run_routes(parts: Parts) -> APIRouter:
    router = APIRouter(prefix="/v1/run", tags=["run"])

    @router.get("", operation_id="getRun", summary="The run, now")
    async def get_run() -> RunView:
        return await _soon(parts.monitor.view())

    @router.post("/start", operation_id="startRun", summary="Start a run that was created")
    async def start(command: Command | None = None) -> RunChange:
        return await _soon(_command(parts, "start", command))

    @router.post("/pause", operation_id="pauseRun", summary="Admit nothing more; groups in flight end")
    async def pause(command: Command | None = None) -> RunChange:
        return await _soon(_command(parts, "pause", command))

    @router.post("/resume", operation_id="resumeRun", summary="Go on exactly where the run was paused")
    async def resume(command: Command | None = None) -> RunChange:
        return await _soon(_command(parts, "resume", command))

    @router.post("/stop", operation_id="stopRun", summary="End the run now; what is in flight is dropped and counted")
    async def stop(command: Command | None = None) -> RunChange:
        return await _soon(_command(parts, "stop", command))

    return router


async def _command(parts: Parts, name: str, command: Command | None) -> RunChange:
    order = ORDERS[name]
    reason = (command.reason if command is not None else "") or f"{name} by HTTP"
    await _mind_rollback(parts.rollbacks, name)
    changed, found = await parts.ledger.transition(order.to, reason, order.allowed)
    if not changed and found is not order.to:
        raise HTTPException(409, f"expected a run that can {name}, found it {found.value}: {order.refusals[found]}")
    if changed:
        parts.changed()
        await tell(parts.bus, "api", f"run {order.to.value}", reason)
    return RunChange(state=order.to, changed=changed, reason=(await parts.ledger.status()).reason)


async def _mind_rollback(rollbacks: Rollbacks, command: str) -> None:
    """A rollback holds the run until its version is live: no resume before; a pause makes it stay paused."""
    if command == "pause":
        await rollbacks.keep_paused()
    found = await rollbacks.current() if command == "resume" else None
    if found is not None and found.stage not in OVER:
        raise HTTPException(
            409,
            f"expected a run that can resume, found a rollback to version {found.target} under way ({found.stage.value}): "
            "GET /v1/rollback says when it is live",
        )


def _rollback_routes(parts: Parts) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["history"])

    @router.post(
        "/policies/{version}/rollback",
        operation_id="rollBack",
        summary="Take the run back to a version: its weights, optimizer, step and place in the dataset",
        status_code=202,
    )
    async def roll_back(version: Version, response: Response, command: Command | None = None) -> RollbackView:
        reason = command.reason if command is not None else ""
        try:
            begun = await _soon(parts.rollbacks.begin(PolicyVersion(version), reason))
        except Refused as refusal:
            raise HTTPException(409 if refusal.known else 404, str(refusal)) from refusal
        response.headers["Location"] = "/v1/rollback"
        return _rollback_view(begun)

    @router.get("/rollback", operation_id="getRollback", summary="The rollback under way, or the last one")
    async def rollback() -> RollbackView:
        found = await _soon(parts.rollbacks.current())
        if found is None:
            raise HTTPException(404, "expected a rollback, found that this run was never rolled back")
        return _rollback_view(found)

    return router


def _rollback_view(found: Rollback) -> RollbackView:
    return RollbackView(**dataclasses.asdict(found))


def _history_routes(parts: Parts) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["history"])

    @router.get("/policies", operation_id="listPolicies", summary="Every policy version with its parent, oldest first")
    async def policies() -> list[PolicyView]:
        return await _soon(_policies(parts.ledger))

    @router.get("/policies/{version}", operation_id="getPolicy", summary="One policy version")
    async def policy(version: Version) -> PolicyView:
        return await _soon(_policy(parts.ledger, PolicyVersion(version)))

    @router.get("/services", operation_id="listServices", summary="Every replica that is there")
    async def services() -> list[ServiceView]:
        beats = await _soon(heartbeats(parts.bus))
        return [ServiceView(**{**dataclasses.asdict(beat), "values": numbers(beat.values)}) for beat in beats]

    return router


async def _policies(ledger: Ledger) -> list[PolicyView]:
    records, states, checkpoints = await asyncio.gather(ledger.policies(), ledger.policy_states(), ledger.checkpoints())
    return [_policy_view(record, states.get(record.version), checkpoints.get(record.version)) for record in records]


async def _policy(ledger: Ledger, version: PolicyVersion) -> PolicyView:
    record, states, checkpoints = await asyncio.gather(
        ledger.policy(version), ledger.policy_states(), ledger.checkpoints()
    )
    if record is None:
        newest = max(states, default=None)
        known = "none yet" if newest is None else f"versions up to {newest}"
        raise HTTPException(
            404, f"expected a policy version of this run, found no version {version}; there are {known}"
        )
    return _policy_view(record, states.get(version), checkpoints.get(version))


def _policy_view(record: PolicyRecord, state: object, checkpoint: str | None) -> PolicyView:
    values = dataclasses.asdict(record)
    return PolicyView(**{**values, "metrics": numbers(record.metrics), "state": state, "checkpoint": checkpoint})


def _health_routes(parts: Parts) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/healthz", operation_id="getHealth", summary="The process runs")
    async def healthz() -> Health:
        return Health(status="ok")

    @router.get("/readyz", operation_id="getReadiness", summary="The coordinator does its work; 503 when not")
    async def readyz(response: Response) -> Readiness:
        ready = parts.status.ready and parts.bus.available
        response.status_code = 200 if ready else 503
        return Readiness(ready=ready, state=parts.status.state, bus=parts.bus.available)

    @router.get("/metrics", operation_id="getMetrics", summary="Prometheus metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

    return router


# ---------------------------------------------------------------- errors


def _problem(status: int, detail: str) -> JSONResponse:
    problem = Problem(type="about:blank", title=http.HTTPStatus(status).phrase, status=status, detail=detail)
    return JSONResponse(problem.model_dump(), status_code=status, media_type=_PROBLEM)


async def _http_problem(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = str(error.detail)
    if error.status_code in (404, 405) and detail == http.HTTPStatus(error.status_code).phrase:
        detail = f"expected a path of this API, found {request.method} {request.url.path}: see /docs"
    return _problem(error.status_code, detail)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    wrong = (f"{'.'.join(str(part) for part in found['loc'])}: {found['msg']}" for found in error.errors())
    return _problem(422, f"expected a request as in /docs, found {'; '.join(wrong)}")


async def _bus_away(request: Request, error: Exception) -> JSONResponse:
    return _problem(
        503, f"expected the bus to answer within {_ANSWER_WITHIN_S:.0f} s, found that it does not: try again"
    )


async def _bug(request: Request, error: Exception) -> JSONResponse:
    log.error("request failed", exc_info=error, extra={"path": request.url.path})
    return _problem(500, "expected to answer, found a bug: see the coordinator's log")
