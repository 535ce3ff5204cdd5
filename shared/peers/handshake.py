"""Mutual proof of a shared secret at the start of a connection.

::

    server ──▶ {challenge: 32 bytes}
    client ──▶ {challenge: 32 bytes, proof: HMAC-SHA256 of both challenges as "client"}
    server ──▶ {proof: HMAC-SHA256 of both challenges as "server"}
"""

import asyncio
import hashlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Literal

from penstock.shared.errors import PeerError
from penstock.shared.peers import frames
from penstock.shared.peers.keep_alive import keep_alive

Secret = Callable[[], bytes]
"""Returns the run's current secret."""
_NONCE_BYTES = 32
_STRANGER_BYTES = 4096
"""Maximum frame length before authentication."""


def admit(connection: socket.socket, secret: bytes, deadline_s: float) -> None:
    """Authenticate a client within twice the deadline; raises PeerError."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    frames.send(connection, {"challenge": ours}, deadline_s)
    answer = frames.receive(connection, deadline_s, _STRANGER_BYTES)
    theirs = _nonce(answer)
    _check(answer, secret, "client", ours + theirs)
    frames.send(connection, {"proof": _prove(secret, "server", ours + theirs)}, deadline_s)


async def admit_async(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    ours = secrets.token_bytes(_NONCE_BYTES)
    writer.write(frames.pack({"challenge": ours}))
    answer = await frames.receive_async(reader, _STRANGER_BYTES)
    nonces = ours + _nonce(answer)
    _check(answer, secret, "client", nonces)
    writer.write(frames.pack({"proof": _prove(secret, "server", nonces)}))


async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Authenticate to a server and verify it, without a deadline; raises PeerError."""
    theirs = _nonce(await frames.receive_async(reader, _STRANGER_BYTES))
    ours = secrets.token_bytes(_NONCE_BYTES)
    writer.write(frames.pack({"challenge": ours, "proof": _prove(secret, "client", theirs + ours)}))
    await writer.drain()
    try:
        answer = await frames.receive_async(reader, _STRANGER_BYTES)
    except PeerError as error:
        raise PeerError(f"the peer did not accept this process: do both belong to the same run? ({error})") from error
    _check(answer, secret, "server", theirs + ours)


async def connect(address: str, secret: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the peer at host:port and introduce this process, without a deadline; raises PeerError or OSError."""
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (ValueError, OverflowError) as error:
        raise PeerError(f"expected host:port of a peer, found {address[:80]!r}") from error
    try:
        keep_alive(writer.get_extra_info("socket"))
        await introduce(reader, writer, secret)
    except BaseException:
        writer.close()
        raise
    return reader, writer


def _nonce(frame: frames.Frame) -> bytes:
    nonce = frame.get("challenge")
    if not isinstance(nonce, bytes) or len(nonce) != _NONCE_BYTES:
        raise PeerError("expected a challenge of 32 bytes of the peer, found other content")
    return nonce


def _prove(secret: bytes, role: Literal["client", "server"], nonces: bytes) -> bytes:
    return hmac.digest(secret, f"penstock {role}".encode() + nonces, hashlib.sha256)


def _check(frame: frames.Frame, secret: bytes, role: Literal["client", "server"], nonces: bytes) -> None:
    proof = frame.get("proof")
    if not secret or not isinstance(proof, bytes) or not hmac.compare_digest(proof, _prove(secret, role, nonces)):
        raise PeerError("the peer does not know the secret of this run")


class Newcomers:
    """Unauthenticated connections; beyond ``limit`` the oldest is dropped, so that silent ones do not block others."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._drops: dict[object, Callable[[], object]] = {}

    def __len__(self) -> int:
        return len(self._drops)

    def enter(self, connection: object, drop: Callable[[], object]) -> None:
        """Count ``connection``; ``drop`` may be called from another thread."""
        with self._lock:
            self._drops[connection] = drop
            oldest = next(iter(self._drops)) if len(self._drops) > self._limit else None
            dropped = None if oldest is None else self._drops.pop(oldest)
        if dropped is not None:
            dropped()

    def leave(self, connection: object) -> None:
        with self._lock:
            self._drops.pop(connection, None)
