"""uvicorn in this process's event loop, on a port bound before anything else starts.

Its address is in <run folder>/coordinator.json.
"""

import asyncio
import json
import logging
import os
import socket
from pathlib import Path

from fastapi import FastAPI

from penstock.services.coordinator.api.errors import problem
from penstock.shared.errors import SettingsError
from penstock.shared.files.durable import write_whole
from penstock.shared.process.connections import ConnectionBounds, Connections

log = logging.getLogger(__name__)


class ApiServer:
    def __init__(self, host: str, port: int, bounds: ConnectionBounds | None = None) -> None:
        self._connections = Connections(bounds or ConnectionBounds(), problem)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise SettingsError(
                f"the HTTP API cannot listen on {host}:{port} ({error.strerror}): "
                "change coordinator.port (0: any free one) or coordinator.host"
            ) from error
        shown = f"[{host}]" if family is socket.AF_INET6 else host.replace("0.0.0.0", "127.0.0.1")  # noqa: S104
        self.address = f"{shown}:{self._socket.getsockname()[1]}"
        self.url = f"http://{self.address}"
        self.answers = asyncio.Event()

    async def run(self, app: FastAPI, announce: Path | None, run_id: str) -> None:
        """Serve until cancelled, then finish open requests. ``announce``: the file that says where."""

        def ready() -> None:
            if announce is not None:
                self.announce(announce, run_id)
            self.answers.set()

        await self._connections.serve(app, self._socket, ready)

    def announce(self, path: Path, run_id: str) -> None:
        """A full disk is retried next time."""
        text = json.dumps({"url": self.url, "pid": os.getpid(), "run_id": run_id}) + "\n"
        try:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                write_whole(path, text)
        except OSError as error:
            log.warning("address not announced", extra={"file": str(path), "error": str(error)})

    def close(self) -> None:
        self._socket.close()
