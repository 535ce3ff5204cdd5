"""Serve one shelf to the run's other processes (``penstock.shared.shelf.protocol``)."""

import asyncio
import hashlib

from penstock.shared.errors import PeerError
from penstock.shared.peers import frames
from penstock.shared.peers.addresses import listen
from penstock.shared.peers.handshake import Secret
from penstock.shared.peers.server import serve_peers
from penstock.shared.shelf import protocol
from penstock.shared.shelf.store import ShelfFull, Store


class Listener:
    """One replica's. Raises SettingsError: it cannot listen on ``host``."""

    def __init__(self, store: Store, replica: str, host: str, secret: Secret) -> None:
        self._store, self._replica, self._secret = store, replica, secret
        self._listener = listen(host, 0, "run.host")
        self.port: int = self._listener.getsockname()[1]

    async def run(self) -> None:
        """Serve until cancelled."""
        await serve_peers(self._listener, self._secret, self._serve, "shelf")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
