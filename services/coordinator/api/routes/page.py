"""The web page: `/` and the files of ``page``, read at the start (docs/api.md, "The page")."""

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse

from penstock.services.coordinator.api.auth import Access
from penstock.services.coordinator.api.dependencies import soon

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
SESSION_PATH, REPORT_PATH = "/session", "/report.html"
_REPORT_HEADERS = HEADERS | {"Content-Security-Policy": "sandbox allow-scripts; frame-ancestors 'none'"}
"""Of a document that may come from elsewhere: it has no access to the page's origin."""


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


def page_routes(access: Access, run_id: str, folder: Path, use: Callable[[str], Awaitable[bool]]) -> APIRouter:
    """Return the page's routes, not in the API description. ``use`` returns whether a code is used for the first time."""
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

    @router.get(REPORT_PATH)
    async def report() -> Response:
        if not (folder / REPORT_PATH[1:]).is_file():
            raise HTTPException(404, "this run has no report.html yet: it is written when the run ends")
        return FileResponse(folder / REPORT_PATH[1:], media_type="text/html", headers=_REPORT_HEADERS)

    @router.post(SESSION_PATH)
    async def session(request: Request) -> Response:
        code = request.headers.get("authorization", "").partition(" ")[2]
        entered = access.enter(code)
        if entered is None or not await soon(use(hashlib.sha256(code.encode()).hexdigest())):
            raise HTTPException(401, "this link was used or has expired: try `penstock page`")
        cookie, ticket = entered
        answer = JSONResponse({"ticket": ticket}, headers={"Cache-Control": "no-store"})
        is_secure = request.headers.get("origin", "").startswith("https://")
        name = session_cookie(run_id)
        answer.set_cookie(name, cookie, httponly=True, samesite="strict", secure=is_secure)
        return answer

    return router
