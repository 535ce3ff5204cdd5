"""python -m penstock.services.coordinator.page RUN_FOLDER: the API's reading routes and the page, of a run that has ended.

It listens on loopback, prints ``{"url": …, "token": …}`` when it answers (``{"error": …}``: it cannot), and ends when its
standard input, a pipe, does.
"""

import asyncio
import functools
import json
import secrets
import sys
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException

from penstock.services.coordinator.api.app import with_conventions
from penstock.services.coordinator.api.auth import Access
from penstock.services.coordinator.api.errors import Conflict
from penstock.services.coordinator.api.routes.events import event_list
from penstock.services.coordinator.api.routes.page import page_routes
from penstock.services.coordinator.api.routes.policies import policy_views
from penstock.services.coordinator.api.routes.records import record_routes
from penstock.services.coordinator.api.routes.run import run_view
from penstock.services.coordinator.api.server import ApiServer
from penstock.services.coordinator.records.ended_run import EndedRun
from penstock.services.coordinator.schemas.resources import Page
from penstock.shared.bus.streams import JOURNAL
from penstock.shared.errors import PenstockError


def make_app(run: EndedRun, access: Access) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.include_router(run_view(run.text))
    app.include_router(record_routes(run.rows, functools.partial(run.rows, JOURNAL), run.folder))
    app.include_router(event_list(run.rows))
    used: set[str] = set()

    async def use(code: str) -> bool:
        is_new = code not in used
        used.add(code)
        return is_new

    app.include_router(policy_views(run.policies, run.policy, run.compared))
    app.include_router(page_routes(access, run.run_id, run.folder, use))
    app.include_router(_rest(run.folder))
    return with_conventions(app, access, run.run_id, None)


def _rest(folder: Path) -> APIRouter:
    router = APIRouter()

    async def empty() -> Page[str]:
        return Page(items=[], next=None)

    async def refuse(request: Request) -> None:
        if request.method == "GET":
            raise HTTPException(404, f"{request.url.path} is not among the records of a run that has ended")
        raise Conflict(f"this run has ended and takes no commands: its records are in {folder}")

    for name in ("services", "operations", "dead-letters"):  # an ended run has none
        router.add_api_route(f"/v1/{name}", empty)
    router.add_api_route("/{path:path}", refuse, methods=["GET", "POST", "PATCH", "DELETE"])
    return router


async def serve(folder: Path) -> None:
    """Serve until standard input ends. Raises SettingsError: no records of an ended run are in ``folder``."""
    run, token = EndedRun(folder), secrets.token_urlsafe(24)
    await run.text()
    server = ApiServer("127.0.0.1", 0)
    serving = asyncio.create_task(server.run(make_app(run, Access(token.encode())), None, run.run_id))
    try:
        left = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), left.set)
        serving.add_done_callback(lambda _: left.set())
        answering = asyncio.ensure_future(server.answers.wait())
        await asyncio.wait([serving, answering], return_when=asyncio.FIRST_COMPLETED)
        _say({"url": server.url, "token": token})
        await left.wait()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        server.close()


def _say(message: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        asyncio.run(serve(Path(sys.argv[1])))
    except PenstockError as error:
        _say({"error": str(error)})
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
