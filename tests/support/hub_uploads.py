"""A server on loopback that speaks the part of the Hugging Face hub's API that takes models."""

import base64
import contextlib
import http.server
import json
import urllib.parse
from collections.abc import Iterator

from tests.support.http_server import served


class Hub:
    """What was uploaded."""

    def __init__(self) -> None:
        self.repositories: dict[str, bool] = {}
        """Whether each is private."""
        self.commits: list[tuple[str, str]] = []
        """Repository and message."""
        self.files: dict[str, bytes] = {}
        self.tokens: set[str] = set()
        self.url = ""


@contextlib.contextmanager
def hub() -> Iterator[Hub]:
    """Serve an empty hub, whose users write with any token but "wrong"."""
    kept = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
            kept.tokens.add(self.headers.get("Authorization", ""))
            if self.headers.get("Authorization") == "Bearer wrong":
                self._json({"error": "Invalid user token."}, 401)
            elif path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                is_private = asked.get("visibility") == "private" or bool(asked.get("private"))
                kept.repositories.setdefault(name, is_private)
                self._json({"url": f"{kept.url}/{name}"})
            elif path.endswith("/preupload/main"):
                files = json.loads(body)["files"]
                modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
                self._json({"files": modes})
            elif path.endswith("/commit/main"):
                self._commit(path.split("/")[3:5], body)
            elif path == "/api/validate-yaml":
                self._json({"errors": [], "warnings": []})
            else:
                self._json({"error": f"unknown: POST {path}"}, 404)

        def do_GET(self) -> None:
            name = self.path.removeprefix("/api/models/")
            if name in kept.repositories:
                self._json({"id": name, "private": kept.repositories[name]})
                return
            self._json({"error": f"unknown: GET {self.path}"}, 404)

        def _commit(self, repository: list[str], body: bytes) -> None:
            header, *lines = [json.loads(line) for line in body.splitlines()]
            kept.commits.append(("/".join(repository), header["value"]["summary"]))
            for line in lines:
                assert line["key"] == "file"
                kept.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            commit = f"{kept.url}/{'/'.join(repository)}/commit/{'5' * 40}"
            self._json({"commitUrl": commit, "commitOid": "5" * 40})

        def _json(self, value: object, status: int = 200) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with served(Handler) as url:
        kept.url = url
        yield kept
