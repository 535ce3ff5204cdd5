"""A server of agents of tests: one that plays, and those whose answers are hostile."""

import asyncio
import contextlib
import http.server
import json
import time
from collections.abc import Iterator

from tests.support.clients import play
from tests.support.http_server import served

HOSTILE: dict[str, tuple[str, int, str]] = {
    "huge": ("has more than 1048576 bytes", 200, '{"reward": 1, "x": "' + "y" * (2 << 20) + '"}'),
    "nan": ("expected an object with a finite number as reward", 200, '{"reward": NaN}'),
    "overflow": ("expected an object with a finite number as reward", 200, '{"reward": 1' + "0" * 400 + "}"),
    "text": ("expected an object with a finite number as reward", 200, '{"reward": "1"}'),
    "none": ("expected an object with a finite number as reward", 200, '{"metrics": {}}'),
    "list": ("expected an object with a finite number as reward", 200, "[1]"),
    "deep": ("expected JSON", 200, "[" * 90_000),
    "failed": ("expected HTTP 200, found 500", 500, '{"reward": 1}'),
    "redirect": ("expected HTTP 200, found 307", 307, '{"reward": 1}'),
    "slow": ("there was no answer within 2 s", 200, ""),
}
"""By path: what is said of it, and the answer."""


@contextlib.contextmanager
def agent_server() -> Iterator[tuple[str, set[str], set[str]]]:
    """Yield the URL of a server, the names of the episodes that it was asked to play, and of those that it was asked to abort."""
    begun, aborted = set[str](), set[str]()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            kind = self.path.strip("/")
            begun.add(asked["id"])
            if kind == "run":
                row = asked["row"]
                task, base_url, api_key = (asked[name] for name in ("task", "base_url", "api_key"))
                reward = asyncio.run(play(task, base_url, api_key, row["secret"], "openai, chat"))
                metrics = {"tries": 3, "bad": float("nan"), "text": "x", "flag": True}
                self._answer(200, json.dumps({"reward": reward, "metrics": metrics}))
                return
            _, status, content = HOSTILE[kind]
            if kind == "slow":
                time.sleep(4.0)
            self._answer(status, content)

        def do_DELETE(self) -> None:
            aborted.add(self.path.rsplit("/", 1)[1])
            self._answer(200, "{}")

        def _answer(self, status: int, content: str) -> None:
            with contextlib.suppress(ConnectionError):
                self.send_response(status)
                self.send_header("location", "/run")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content.encode())

        def log_message(self, *_: object) -> None:
            return

    with served(Handler) as url:
        yield url, begun, aborted
