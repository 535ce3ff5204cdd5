"""/metrics, /healthz and /readyz over HTTP, on a daemon thread (docs/reference/listeners.md).

Without a token, against DNS rebinding, ``Host`` must name this machine or a private network.
"""

import contextlib
import importlib.metadata
import ipaddress
import json
import logging
import platform
import re
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, Gauge, generate_latest

from penstock.shared.bus.messages import Json
from penstock.shared.errors import SettingsError
from penstock.shared.peers.addresses import is_loopback
from penstock.shared.peers.handshake import Newcomers

log = logging.getLogger(__name__)

BUILD = Gauge("penstock_build_info", "1 for the version of Penstock that this process runs.", ["version", "python"])
MAX_CONNECTIONS = 64
_TIMEOUT_S = 5.0
_PROBES = ("/healthz", "/readyz")
_PRIVATE = re.compile(r"[a-z0-9_-]+|.+\.(?:svc|local|internal|lan|home\.arpa)")
"""Names in Docker Compose, a cluster or a private network, never of public pages."""
_Answer = tuple[int, str, bytes]


class Endpoints:
    def __init__(self, host: str, port: int, setting: str, ready: Callable[[], Mapping[str, Json]]) -> None:
        names = frozenset({host.lower(), socket.gethostname().lower()})
        is_private = not is_loopback(host)

        def answer(path: str, hosts: list[str]) -> _Answer:
            is_probe = not hosts and path in _PROBES  # browsers always send Host
            admitted = is_probe or admits(hosts, names, private=is_private)
            return _answer(path, ready) if admitted else _problem(421, _misdirected(hosts))

        try:
            self._server = _Server((host, port), _handler(answer))
        except OSError as error:
            raise SettingsError(f"/metrics cannot listen on {host}:{port} ({error}): change {setting}") from error
        BUILD.labels(_version(), platform.python_version()).set(1)
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="endpoints", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def admits(hosts: list[str], names: frozenset[str], *, private: bool = False) -> bool:
    """Whether a request with these ``Host`` headers is for a machine of these ``names``.

    Args:
        private: also accept names of private networks.

    >>> [admits([host], frozenset({"gpu-7"})) for host in ("10.0.0.7:9400", "[fd00::7]", "localhost:9400", "GPU-7:9400", "evil.example")]
    [True, True, True, True, False]
    """
    if len(hosts) != 1:
        return False
    name = re.sub(r":[0-9]*$", "", hosts[0].strip()).strip("[]").lower()
    known = name == "localhost" or name in names or _is_address(name)
    return known or (private and _PRIVATE.fullmatch(name) is not None)


def _is_address(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def _answer(path: str, ready: Callable[[], Mapping[str, Json]]) -> _Answer:
    if path == "/metrics":
        return 200, CONTENT_TYPE_LATEST, generate_latest(REGISTRY)
    if path == "/healthz":
        return 200, "application/json", b'{"status": "ok"}'
    if path == "/readyz":
        checks = dict(ready())
        return (200 if checks.get("ready") else 503), "application/json", json.dumps(checks).encode()
    return _problem(404, "no such path; try /metrics, /healthz or /readyz")


def _misdirected(hosts: list[str]) -> str:
    given = ", ".join(hosts)[:200] or "none"
    return f"expected an IP address, localhost or this machine's name as Host, found {given}: set run.host to serve another name"


def _problem(status: int, detail: str) -> _Answer:
    return status, "application/json", json.dumps({"status": detail}).encode()


def _version() -> str:
    try:
        return importlib.metadata.version("penstock")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._connections = Newcomers(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.enter(request, lambda: _hang_up(request))
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request broke", exc_info=True)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _handler(answer: Callable[[str, list[str]], _Answer]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT_S

        def do_GET(self) -> None:
            status, kind, body = answer(self.path.partition("?")[0], self.headers.get_all("Host", []))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            log.debug("request", extra={"said": format % args})

    return Handler
