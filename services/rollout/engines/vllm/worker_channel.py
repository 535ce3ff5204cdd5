"""One socket between a replica and its engine's workers.

::

    worker (each rank)   Reporter ◀── challenge             frames (penstock.shared.peers)
                                  ──▶ hello                 with a proof that it knows the secret
                                  ◀── welcome
                                  ──▶ row, staged           one writer thread
                                  ◀── stage, abort          a reader thread: no step of the model is waited for
    rollout process      Reports  ──▶ per request: logprobs and versions; per staging: ok or an error of each rank

Within a host: a Unix socket in a private folder. Across hosts: TCP, authenticated by HMAC-SHA256 of a challenge and the
rank (``rollout.secret_file``), not encrypted. Workers end with their replica; a worker's death is reported at once, a
vanished host's after ``penstock.shared.peers.keep_alive.SILENT_S``.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import logging
import os
import queue
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from penstock.services.rollout.engines import fork_server
from penstock.shared.bus.messages import Float32Array, Int32Array, no_ids
from penstock.shared.errors import PeerError
from penstock.shared.files import temporary
from penstock.shared.model.routes import RouteArray
from penstock.shared.peers import frames
from penstock.shared.peers.frames import Frame
from penstock.shared.peers.handshake import Newcomers
from penstock.shared.peers.keep_alive import keep_alive
from penstock.shared.process.memory_timeline import Held
from penstock.shared.weights.format.shares import Sums

log = logging.getLogger(__name__)

_STRANGER_BYTES, _STRANGERS = 4096, 64
"""Limits of unauthenticated connections: bytes, and number; one more drops the oldest."""
_MAX_RANKS, _MAX_PIDS = 1 << 16, 16
_GREETING_S = 10.0
_CHILD = re.compile(r"(?:(\d+)_)?(g\d+)(?:-.*)?")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """One sample's logprobs (float32, T or more), (first token, version) pairs, with truncation the number of possible
    tokens at each position and their ids, and with ``trainer.router_replay`` the experts of the token read at each.
    """

    logprobs: Float32Array
    versions: tuple[tuple[int, int], ...]
    support_sizes: Int32Array = dataclasses.field(default_factory=no_ids)
    support_ids: Int32Array = dataclasses.field(default_factory=no_ids)
    routes: RouteArray | None = None


class Reporter:
    """A worker's end; ends this process when the replica dies. ``obey`` gets messages in a thread.

    ``beside`` is whether the replica is on this host, so that this process's parent ends too. Raises PeerError if the
    replica is unreachable or refuses this worker.
    """

    def __init__(
        self, address: str, rank: int, obey: Callable[[Frame], None], *, secret: bytes = b"", beside: bool = True
    ) -> None:
        self._obey = obey
        self._beside = beside
        try:
            with contextlib.ExitStack() as refused:
                self._socket = refused.enter_context(_connect(address))
                self._greet(rank, secret)
                self._socket.settimeout(None)
                refused.pop_all()
        except (OSError, PeerError) as error:
            raise PeerError(f"the replica at {address} did not accept rank {rank}: {error}") from error
        self._waiting: queue.SimpleQueue[Callable[[], Iterable[Frame]]] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="reports", daemon=True).start()
        threading.Thread(target=self._watch, name="replica watch", daemon=True).start()

    def _greet(self, rank: int, secret: bytes) -> None:
        challenge = frames.receive(self._socket, _GREETING_S)
        self._replica = int(challenge["pid"])
        pids = [os.getpid(), *self._parents()] if self._beside else []
        proof = prove(secret, challenge["nonce"], rank)
        self._socket.sendall(frames.pack({"kind": "hello", "rank": rank, "pids": pids, "proof": proof}))
        try:
            frames.receive(self._socket, _GREETING_S)
        except PeerError as error:
            raise PeerError("it refused: rollout.secret_file must hold the same secret on every host") from error

    def send(self, messages: Callable[[], Iterable[Frame]]) -> None:
        """Send ``messages()``, called in the writer's thread, where it may wait for a device."""
        self._waiting.put(messages)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the replica is gone: _watch ends the process
            while True:
                for message in self._waiting.get()():
                    self._socket.sendall(frames.pack(message))

    def _watch(self) -> None:
        """Obey until the replica's end; then end this process, and its parent if that is a process of the engine."""
        parents = self._parents()
        with contextlib.suppress(OSError, PeerError):
            while True:
                self._obey(frames.receive(self._socket, None))
        if self._beside and parents == self._parents():
            for parent in parents:
                with contextlib.suppress(OSError):
                    os.kill(parent, signal.SIGKILL)
        os._exit(1)

    def _parents(self) -> list[int]:
        """Return the parent if it is a process of the engine, not the replica or the server that forks its engines."""
        parent = os.getppid()
        return [] if parent in (self._replica, fork_server.forked_from(), 1) else [parent]


def prove(secret: bytes, nonce: bytes, rank: int) -> bytes:
    """Return HMAC-SHA256 of the challenge ``nonce`` and ``rank`` under ``secret``."""
    return hmac.digest(secret, nonce + rank.to_bytes(4, "little"), hashlib.sha256)


def _connect(address: str) -> socket.socket:
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_GREETING_S)
        connection.connect(address.removeprefix("unix:"))
        return connection
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), _GREETING_S)
    keep_alive(connection)
    return connection


class Reports:
    """The replica's end. ``host`` is for other hosts' workers ("": none), which must know ``secret``."""

    def __init__(self, host: str = "", secret: bytes = b"") -> None:
        self.address = ""
        """The workers' address, once open: ``unix:/path`` or ``host:port``."""
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the known reason, once a worker has died."""
        self.pids: set[int] = set()
        """Local processes of the engine: the workers and their parent."""
        self.held: dict[int, Held] = {}
        """What each rank holds, as last measured."""
        self._host, self._secret = host, secret
        self._folder: Path | None = None
        self._rows: dict[str, dict[int, TokenRow]] = {}
        self._stagings: dict[int, dict[int, tuple[str, float, Sums]]] = {}
        self._changed = asyncio.Condition()
        self._readers: set[asyncio.Task[None]] = set()
        self._strangers = Newcomers(_STRANGERS)
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._closed = False

    async def open(self) -> None:
        if self._host:
            self._server = await asyncio.start_server(self._serve, self._host, 0)
            self.address = f"{self._host}:{self._server.sockets[0].getsockname()[1]}"
            return
        self._folder = temporary.make("engine")
        path = str(self._folder / "reports")
        self._server = await asyncio.start_unix_server(self._serve, path)
        self.address = f"unix:{path}"

    def tell(self, message: Frame) -> None:
        data = frames.pack(message)
        for writer in self._writers:
            writer.write(data)

    def expect(self, request: str) -> None:
        """Keep the rows of ``request`` (``g<number>``) from now on; others are dropped."""
        self._rows[request] = {}

    def forget(self, request: str) -> None:
        """Drop past and future rows of ``request``."""
        self._rows.pop(request, None)

    async def rows(self, request: str, samples: int) -> list[TokenRow]:
        """Wait for all ``samples`` rows of ``request``, in order."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._rows[request]) >= samples)
        rows = self._rows[request]
        return [rows[place] for place in range(samples)]

    async def staged(self, staging: int, ranks: int) -> tuple[str, float, list[Sums]]:
        """Wait for every rank's end of ``staging``; return the first error or "", the maximum seconds, and the ranks' sums of
        their shares."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._stagings.get(staging, {})) >= ranks)
        errors, seconds, sums = zip(*self._stagings.pop(staging).values(), strict=True)
        return next(filter(None, errors), ""), max(seconds), list(sums)

    async def close(self) -> None:
        """Stop listening; remaining workers end themselves."""
        self._closed = True
        for reader in self._readers:
            reader.cancel()
        if self._readers:
            await asyncio.wait(self._readers)
        if self._server is not None:
            self._server.close()
        self.died.cancel()
        if self._folder is not None:
            temporary.remove(self._folder)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        self._strangers.enter(task, task.cancel)
        try:
            rank = await self._welcome(reader, writer)
            self._strangers.leave(task)
            if rank is not None:
                await self._listen(rank, reader)
        except asyncio.CancelledError:
            pass
        finally:
            self._strangers.leave(task)
            self._writers.discard(writer)
            writer.close()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        nonce = secrets.token_bytes(32)
        try:
            writer.write(frames.pack({"kind": "challenge", "nonce": nonce, "pid": os.getpid()}))
            async with asyncio.timeout(_GREETING_S):
                rank, pids, proof = _hello(await frames.receive_async(reader, _STRANGER_BYTES))
        except (OSError, PeerError) as error:
            log.debug("refused a connection that is not a worker's", extra={"found": repr(error)})
            return None
        if not hmac.compare_digest(proof, prove(self._secret, nonce, rank)):
            log.warning("refused a worker that does not know the secret in rollout.secret_file", extra={"rank": rank})
            return None
        if self._host:
            keep_alive(writer.get_extra_info("socket"))
        self.pids.update(pids - {os.getpid()})
        if self._folder is not None:
            temporary.note_shared_memory(self._folder, self.pids)
        writer.write(frames.pack({"kind": "welcome"}))
        self._writers.add(writer)
        return rank

    async def _listen(self, rank: int, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                await self._note(rank, await frames.receive_async(reader, frames.SAMPLE_BYTES))
        except (OSError, PeerError, LookupError, TypeError, ValueError) as error:
            if not self._closed and not self.died.done():
                self.died.set_result(f"worker {rank} went away: {error}")

    async def _note(self, rank: int, message: Frame) -> None:
        if message["kind"] == "staged":
            end = (message["error"], message["seconds"], message["sums"])
            self._stagings.setdefault(message["staging"], {})[rank] = end
            self.held[rank] = held_of(message["held"])
        elif not self._keep(message):
            return
        async with self._changed:
            self._changed.notify_all()

    def _keep(self, message: Frame) -> bool:
        """Keep an expected row. vLLM names samples ``<place>_<ours>-<random>``, or without the place if single."""
        match = _CHILD.fullmatch(message["request"])
        if match is None or match[2] not in self._rows:
            return False
        logprobs = np.frombuffer(message["logprobs"], dtype=np.float32)
        versions = tuple((int(first), int(version)) for first, version in message["versions"])
        sizes, ids = (np.frombuffer(message.get(name, b""), dtype=np.int32) for name in ("sizes", "ids"))
        row = TokenRow(logprobs, versions, sizes, ids, _routes(message.get("routes")))
        self._rows[match[2]][int(match[1] or 0)] = row
        return True


def _routes(message: Frame | None) -> RouteArray | None:
    if message is None:
        return None
    kind: np.dtype[Any] = np.dtype(message["kind"])
    routes: RouteArray = np.frombuffer(message["ids"], dtype=kind).reshape(message["shape"])
    return routes


def held_of(message: Frame) -> Held:
    name, capacity_bytes = message["place"]
    return Held((name, capacity_bytes), message["components"], message["total_bytes"], "graphs and logits")


def _hello(message: Frame) -> tuple[int, set[int], bytes]:
    rank, pids, proof = (message.get(name) for name in ("rank", "pids", "proof"))
    if not _is_whole(rank, 0, _MAX_RANKS - 1) or not isinstance(pids, list) or not isinstance(proof, bytes):
        raise OSError("a greeting without rank, processes and proof")
    if len(pids) > _MAX_PIDS or not all(_is_whole(pid, 1, 1 << 30) for pid in pids):
        raise OSError("a greeting with malformed processes")
    return rank, set(pids), proof


def _is_whole(value: object, least: int, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
