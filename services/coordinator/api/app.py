"""The HTTP API (docs/api.md); commands are idempotent.

::

    /v1/run                           live view, commands, history
    /v1/run/settings                  live settings
    /v1/run/steps, /v1/run/rollouts   training records
    /v1/run/generate                  completions of the live policy
    /v1/operations                    long-running commands
    /v1/policies                      versions, marks, comparison
    /v1/services                      replicas: cordon, uncordon, drain
    /v1/dead-letters                  failed entries
    /v1/events                        list and stream
    /v1/runs                          every run on this bus
    /, /report.html, /healthz, /readyz, /openapi.json
"""

import functools
import math
from typing import Any

from fastapi import APIRouter, FastAPI, Response

from penstock.services.coordinator.api.auth import Access
from penstock.services.coordinator.api.compression import Compressed
from penstock.services.coordinator.api.dependencies import Parts
from penstock.services.coordinator.api.errors import PROBLEM_TYPE, handle_problems
from penstock.services.coordinator.api.middleware import OPEN_PATHS, STREAM_PATH, Conventions
from penstock.services.coordinator.api.routes.events import event_routes
from penstock.services.coordinator.api.routes.generate import generate_routes
from penstock.services.coordinator.api.routes.page import page_routes
from penstock.services.coordinator.api.routes.policies import policy_routes
from penstock.services.coordinator.api.routes.records import record_routes
from penstock.services.coordinator.api.routes.registry import registry_routes
from penstock.services.coordinator.api.routes.run import operation_routes, run_routes, settings_routes
from penstock.services.coordinator.api.routes.services import dead_letter_routes, service_routes
from penstock.services.coordinator.schemas.run import Health, ProblemDetails, Readiness
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.run.idempotency import use_once
from penstock.shared.peers.tickets import PAGE_S
from penstock.shared.process.service import readiness

_PROBLEM_ANSWER = {
    "description": "An error.",
    "content": {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}},
}
_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Requests repeated with the same key, such as a UUID, take effect once.",
    "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
}


def make_app(parts: Parts) -> FastAPI:
    return with_conventions(make_routes(parts), parts.access, parts.bus.keys.run_id, parts.bus)


def with_conventions(app: FastAPI, access: Access, run_id: str, bus: Bus | None) -> FastAPI:
    """Add middleware and error answers."""
    app.add_middleware(Compressed)
    app.add_middleware(Conventions, access=access, run_id=run_id, bus=bus, routes=app.routes)
    handle_problems(app)
    return app


def make_routes(parts: Parts) -> FastAPI:
    """Return the routes without middleware."""
    app = FastAPI(
        title="Penstock coordinator",
        summary="Observe and control a run and its policy versions.",
        version="1",
        docs_url=None,  # the default page loads external scripts
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the request's Host
    )
    routers = [run_routes(parts), record_routes(parts.rows, parts.trained, parts.folder)]
    more = (settings_routes, operation_routes, policy_routes, service_routes, dead_letter_routes)
    routers += [routes(parts) for routes in (*more, event_routes, registry_routes, generate_routes, _health_routes)]
    use = functools.partial(use_once, parts.bus, seconds=math.ceil(PAGE_S))
    routers.append(page_routes(parts.access, parts.bus.keys.run_id, parts.folder, use))
    for router in routers:
        app.routes.extend(router.routes)  # include_router makes each route again: half of the API's start
    described = app.openapi
    app.openapi = lambda: app.openapi_schema or _described(described())  # type: ignore[method-assign]
    return app


def _health_routes(parts: Parts) -> APIRouter:
    router = APIRouter(tags=["health"], responses={"default": {"model": ProblemDetails}})

    @router.get("/healthz", operation_id="getHealth", summary="The process runs")
    async def healthz() -> Health:
        return Health(status="ok")

    @router.get(
        "/readyz",
        operation_id="getReadiness",
        summary="The coordinator works; otherwise 503",
        responses={503: {"model": Readiness, "description": "It does not work; `checks` give the reasons."}},
    )
    async def readyz(response: Response) -> Readiness:
        answer = Readiness.model_validate(readiness(parts.status, parts.bus.available))
        response.status_code = 200 if answer.ready else 503
        return answer

    return router


def _described(schema: dict[str, Any]) -> dict[str, Any]:
    schemas = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schema["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"bearer": []}]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = _PROBLEM_ANSWER
            if path in OPEN_PATHS:
                operation["security"] = []
            if method == "post":
                operation.setdefault("parameters", []).append(_IDEMPOTENCY_KEY)
            if path == STREAM_PATH:
                operation["responses"]["200"]["content"].pop("application/json", None)
    return schema
