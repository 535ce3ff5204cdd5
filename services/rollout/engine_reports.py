"""One Unix socket between a replica and the workers of its engine: rows of finished requests, stagings, and death.

::

    worker (each rank)   Reporter ──▶ hello, row, staged     length-prefixed msgpack, one writer thread
                                  ◀── stage, abort           a reader thread: no step of the model is waited for
    rollout process      Reports  ──▶ per request: logprobs and versions; per staging: ok or an error of each rank

The socket lies in a folder that only its owner may enter. It is also how each side learns that the other is gone: a worker
whose replica died ends itself at once, and a replica whose worker died is told before vLLM notices.
"""

import asyncio
import contextlib
import dataclasses
import os
import queue
import re
import shutil
import signal
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from shared.messages import Float32Array

_LENGTH = struct.Struct("<I")
_PEER = struct.Struct("=i8x")
_LARGEST_BYTES = 64 << 20
_CHILD = re.compile(r"(?:(\d+)_)?(g\d+)(?:-.*)?")

Message = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Row:
    """What a worker noted of one sample: logprobs (float32, T or more) and (first token, version) pairs."""

    logprobs: Float32Array
    versions: tuple[tuple[int, int], ...]


class Reporter:
    """A worker's end. ``obey`` gets what the replica tells, in a thread. Ends this process when the replica goes away."""

    def __init__(self, path: str, rank: int, obey: Callable[[Message], None]) -> None:
        self._obey = obey
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._waiting: queue.SimpleQueue[Callable[[], Iterable[Message]]] = queue.SimpleQueue()
        self.send(lambda: [{"kind": "hello", "rank": rank, "pids": [os.getpid(), os.getppid()]}])
        threading.Thread(target=self._write, name="reports", daemon=True).start()
        threading.Thread(target=self._watch, name="replica watch", daemon=True).start()

    def send(self, messages: Callable[[], Iterable[Message]]) -> None:
        """Send what ``messages`` returns; it is called in the writer's thread, where it may wait for a device."""
        self._waiting.put(messages)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the replica is gone: _watch ends the process
            while True:
                for message in self._waiting.get()():
                    data = msgpack.packb(message)
                    self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def _watch(self) -> None:
        """Obey until the replica's end; then end the process that started this one, if that is not the replica, and this."""
        parent, replica = os.getppid(), _peer(self._socket)
        with contextlib.suppress(OSError), self._socket.makefile("rb") as stream:
            while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
                (length,) = _LENGTH.unpack(head)
                if len(data := stream.read(length)) == length:
                    self._obey(msgpack.unpackb(data))
        if parent not in (replica, 1) and parent == os.getppid():
            with contextlib.suppress(OSError):
                os.kill(parent, signal.SIGKILL)
        os._exit(1)


def _peer(connection: socket.socket) -> int:
    """Return the process at the other end of a Unix socket."""
    (pid,) = _PEER.unpack_from(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(pid)


class Reports:
    """The replica's end."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-engine-"))
        self.path = str(self._folder / "reports")
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with what is known of it, once a worker has gone away."""
        self.pids: set[int] = set()
        """Processes of the engine: those of the workers, and the one that started them."""
        self._rows: dict[str, dict[int, Row]] = {}
        self._stagings: dict[int, dict[int, tuple[str, float]]] = {}
        self._changed = asyncio.Condition()
        self._readers: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._closed = False

    async def open(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    def tell(self, message: Message) -> None:
        """Send ``message`` to every worker."""
        data = msgpack.packb(message)
        for writer in self._writers:
            writer.write(_LENGTH.pack(len(data)) + data)

    def expect(self, request: str) -> None:
        """Keep the rows of ``request`` (of the form ``g<number>``) from now on; those of others are dropped."""
        self._rows[request] = {}

    def forget(self, request: str) -> None:
        """Drop what came and comes of ``request``."""
        self._rows.pop(request, None)

    async def rows(self, request: str, samples: int) -> list[Row]:
        """Wait for all ``samples`` rows of ``request``, in their order."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._rows[request]) >= samples)
        found = self._rows[request]
        return [found[place] for place in range(samples)]

    async def staged(self, staging: int, ranks: int) -> tuple[str, float]:
        """Wait until every rank has ended staging ``staging``; return the first error or nothing, and the longest seconds."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._stagings.get(staging, {})) >= ranks)
        ends = self._stagings.pop(staging).values()
        return next((error for error, _ in ends if error), ""), max(seconds for _, seconds in ends)

    async def close(self) -> None:
        """Stop listening; workers that are still there end themselves."""
        self._closed = True
        for reader in self._readers:
            reader.cancel()
        if self._readers:
            await asyncio.wait(self._readers)
        if self._server is not None:
            self._server.close()
        self.died.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        self._writers.add(writer)
        rank = -1
        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                if length > _LARGEST_BYTES:
                    raise OSError(f"a message of {length} bytes")
                message = msgpack.unpackb(await reader.readexactly(length))
                rank = message["rank"] if message["kind"] == "hello" else rank
                await self._note(message)
        except (OSError, asyncio.IncompleteReadError) as error:
            if not self._closed and not self.died.done():
                self.died.set_result(f"worker {rank} went away: {error}")
        except asyncio.CancelledError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _note(self, message: Message) -> None:
        if message["kind"] == "hello":
            self.pids.update(set(message["pids"]) - {os.getpid()})
            return
        if message["kind"] == "staged":
            self._stagings.setdefault(message["staging"], {})[message["rank"]] = (message["error"], message["seconds"])
        elif not self._keep(message):
            return
        async with self._changed:
            self._changed.notify_all()

    def _keep(self, message: Message) -> bool:
        """Keep a row that is expected. vLLM names a sample ``<place>_<ours>-<random>``, without the place if it is alone."""
        found = _CHILD.fullmatch(message["request"])
        if found is None or found[2] not in self._rows:
            return False
        logprobs = np.frombuffer(message["logprobs"], dtype=np.float32)
        versions = tuple((int(first), int(version)) for first, version in message["versions"])
        self._rows[found[2]][int(found[1] or 0)] = Row(logprobs, versions)
        return True
