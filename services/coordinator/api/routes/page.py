"""The web page: `/` and the files of ``page``, read at the start (docs/api.md, "The page")."""

import hashlib
import math
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from penstock.services.coordinator.api.dependencies import Parts, soon
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.run import idempotency
from penstock.shared.peers.tickets import PAGE_S

FOLDER = Path(__file__).parents[1] / "page"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
PREFIX = "/page/"
SESSION_PATH = "/session"


def page_type(path: str) -> str | None:
    """Return the media type of the page's file at ``path``, if any.

    >>> page_type("/"), page_type("/page/look.css"), page_type("/v1/run")
    ('text/html', 'text/css', None)
    """
    if path == "/":
        return "text/html"
    return _TYPES.get(Path(path).suffix, "*/*") if path.startswith(PREFIX) else None


def session_cookie(run_id: str) -> str:
    """Return a cookie name unique to the run: browsers share a host's cookies."""
    return f"penstock-{run_id}"


def page_routes(parts: Parts) -> APIRouter:
    """Return the page's routes, not in the API description."""
    router = APIRouter(include_in_schema=False)
    files = {file.name: file.read_bytes() for file in FOLDER.iterdir() if file.suffix in _TYPES}

    @router.get("/")
    async def index() -> Response:
        return Response(files["index.html"], media_type="text/html", headers=HEADERS)

    @router.get(PREFIX + "{name}")
    async def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, f"the page has no file named {name!r}")
        return Response(files[name], media_type=page_type(PREFIX + name), headers=HEADERS)

    @router.post(SESSION_PATH)
    async def session(request: Request) -> Response:
        code = request.headers.get("authorization", "").partition(" ")[2]
        entered = parts.access.enter(code)
        if entered is None or not await soon(_use(parts.bus, code)):
            raise HTTPException(401, "this link was used or has expired: try `penstock page`")
        cookie, ticket = entered
        answer = JSONResponse({"ticket": ticket}, headers={"Cache-Control": "no-store"})
        is_secure = request.headers.get("origin", "").startswith("https://")
        name = session_cookie(parts.bus.keys.run_id)
        answer.set_cookie(name, cookie, httponly=True, samesite="strict", secure=is_secure)
        return answer

    return router


async def _use(bus: Bus, code: str) -> bool:
    return await idempotency.use_once(bus, hashlib.sha256(code.encode()).hexdigest(), math.ceil(PAGE_S))
