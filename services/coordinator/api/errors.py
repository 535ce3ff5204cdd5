"""Errors as `application/problem+json` (RFC 9457)."""

import http
import logging
from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from penstock.services.coordinator.operations.operations import StateConflict
from penstock.services.coordinator.schemas.run import ProblemDetails
from penstock.shared.errors import BusUnavailable, SettingsError

log = logging.getLogger(__name__)

PROBLEM_TYPE = "application/problem+json"
ANSWER_WITHIN_S = 5.0
RETRY_AFTER_S = 2
"""After a 503 for lack of capacity."""


class Conflict(HTTPException):
    def __init__(self, detail: str) -> None:
        super().__init__(409, detail)


def problem(
    status: int, detail: str, headers: Mapping[str, str] | None = None, errors: Sequence[str] = ()
) -> JSONResponse:
    title = http.HTTPStatus(status).phrase
    body = ProblemDetails(type="about:blank", title=title, status=status, detail=detail, errors=list(errors))
    return JSONResponse(body.model_dump(), status_code=status, headers=dict(headers or {}), media_type=PROBLEM_TYPE)


def handle_problems(app: FastAPI) -> None:
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(SettingsError, _settings)
    app.add_exception_handler(StateConflict, _misfit)
    app.add_exception_handler(TimeoutError, _bus_away)
    app.add_exception_handler(BusUnavailable, _bus_away)
    app.add_exception_handler(Exception, _bug)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = str(error.detail)
    if error.status_code in (404, 405) and detail == http.HTTPStatus(error.status_code).phrase:
        detail = f"expected a path of this API, found {request.method} {request.url.path}: see /openapi.json"
    headers = {"Allow": _allowed(request)} if error.status_code == 405 else error.headers
    return problem(error.status_code, detail, headers)


def _allowed(request: Request) -> str:
    """Return the path's methods; the router gives only its first route's."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is Match.PARTIAL]
    methods = {method for route in routes for method in route.methods}
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    wrong = [f"{'.'.join(str(part) for part in mistake['loc'])}: {mistake['msg']}" for mistake in error.errors()]
    return problem(422, f"expected a request as in /openapi.json, found {'; '.join(wrong)}", errors=wrong)


async def _settings(request: Request, error: Exception) -> JSONResponse:
    return problem(422, str(error), errors=str(error).splitlines())


async def _misfit(request: Request, error: Exception) -> JSONResponse:
    return problem(409, str(error))


async def _bus_away(request: Request, error: Exception) -> JSONResponse:
    return bus_away()


def bus_away() -> JSONResponse:
    return problem(503, f"the bus did not answer within {ANSWER_WITHIN_S:.0f} s: try again")


async def _bug(request: Request, error: Exception) -> JSONResponse:
    log.error("request failed", exc_info=error, extra={"path": request.url.path})
    return problem(500, "internal error: see the coordinator's log")
