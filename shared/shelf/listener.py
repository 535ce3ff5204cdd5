"""Serve one shelf to the run's other processes (``penstock.shared.shelf.protocol``)."""

import asyncio
import hashlib
import logging
import socket

from penstock.shared.errors import PeerError
from penstock.shared.peers import frames
from penstock.shared.peers.addresses import listen
from penstock.shared.peers.handshake import Newcomers, Secret, admit_async
from penstock.shared.peers.keep_alive import keep_alive
from penstock.shared.shelf import protocol
from penstock.shared.shelf.store import ShelfFull, Store

log = logging.getLogger(__name__)

_STRANGERS = 64
_HANDSHAKE_S = 10.0


class Listener:
    """One replica's. Raises SettingsError: it cannot listen on ``host``."""

    def __init__(self, store: Store, replica: str, host: str, secret: Secret) -> None:
        self._store, self._replica, self._secret = store, replica, secret
        self._listener = listen(host, 0, "run.host")
        self._strangers = Newcomers(_STRANGERS)
        self.port: int = self._listener.getsockname()[1]

    async def run(self) -> None:
        """Serve until cancelled."""
        connections: set[asyncio.Task[None]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            try:
                await self._serve(reader, writer)
            except asyncio.CancelledError:
                return  # asyncio reports handlers that were cancelled as errors
            except (PeerError, OSError, TimeoutError) as error:
                log.debug("a connection to the shelf ended", extra={"reason": str(error)})
            except Exception:
                log.exception("a connection to the shelf broke")
            finally:
                connections.discard(task)
                writer.close()

        server = await asyncio.start_server(serve, sock=self._listener)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            for task in connections:
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: socket.socket = writer.get_extra_info("socket")
        keep_alive(connection)
        self._strangers.enter(writer, writer.close)
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await admit_async(reader, writer, self._secret())
        finally:
            self._strangers.leave(writer)
        while True:
            request = await protocol.hear(reader)
            if "put" in request:
                await self._keep(request, reader, writer)
            else:
                await self._give(request, writer)

    async def _keep(self, request: frames.Frame, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (group_id, digest), size = protocol.payload_named(request, "put"), protocol.size_of(request)
        try:
            with self._store.receiving(group_id, digest, size) as file:
                await protocol.say(writer, {"go": True})
                hashed = hashlib.sha256()
                async for part in protocol.parts(reader, size):
                    await asyncio.to_thread(hashed.update, part)
                    await asyncio.to_thread(file.write, part)
                if hashed.hexdigest() != digest:
                    raise PeerError("expected the payload of a digest of the peer, found another")
        except ShelfFull:
            await protocol.say(writer, {"full": True})
            return
        await protocol.say(writer, {"kept": True})

    async def _give(self, request: frames.Frame, writer: asyncio.StreamWriter) -> None:
        group_id, digest = protocol.payload_named(request, "get")
        payload = None
        if protocol.field(request, "of", str) == self._replica:
            payload = await asyncio.to_thread(self._store.read, group_id, digest)
        if payload is None:
            await protocol.say(writer, {"absent": True})
            return
        await protocol.say(writer, {"size": len(payload)})
        await protocol.send(writer, payload)
