"""A server on loopback that speaks the part of the Hugging Face hub's API that reads datasets and models."""

import contextlib
import hashlib
import http.server
import json
import urllib.parse
from collections.abc import Iterator, Mapping

from tests.support.http_server import served

COMMIT = "5" * 40


@contextlib.contextmanager
def hub(
    repository: str, files: Mapping[str, bytes], asked: list[str] | None = None, kind: str = "datasets"
) -> Iterator[str]:
    """Serve one dataset (or of `models` one) at the branch ``main``, which is COMMIT; ``asked`` receives the requests."""

    place = "" if kind == "models" else f"/{kind}"

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._handle()

        def do_GET(self) -> None:
            self._handle()

        def do_POST(self) -> None:
            self._handle(self.rfile.read(int(self.headers.get("Content-Length", 0))))

        def _handle(self, body: bytes = b"") -> None:
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
            if asked is not None:
                asked.append(f"{self.command} {path}")
            api = f"/api/{kind}/{repository}"
            if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                siblings = [{"rfilename": name} for name in files]
                self._json(
                    {"_id": "1", "id": repository, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
                )
            elif path.startswith(f"{api}/tree/"):
                self._json([entry(name) for name in files])
            elif path.startswith(f"{api}/paths-info/"):
                paths = (
                    urllib.parse.parse_qs(body.decode()).get("paths", []) if b"=" in body else json.loads(body)["paths"]
                )
                self._json([entry(name) for name in paths if name in files])
            elif path.startswith(f"{place}/{repository}/resolve/"):
                self._file(path.removeprefix(f"{place}/{repository}/resolve/").split("/", 1)[1])
            else:
                self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

        def _file(self, name: str) -> None:
            if name not in files:
                self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
                return
            self._answer(files[name], 200, {"ETag": f'"{digest(files[name])}"', "X-Repo-Commit": COMMIT})

        def _json(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
            self._answer(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

        def _answer(self, content: bytes, status: int, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    def entry(name: str) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(files[name]), "oid": digest(files[name])}

    with served(Handler) as url:
        yield url


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
