"""Serve the run's other processes over a listening socket: each connection proves that it knows the run's secret, and what
breaks it ends no other.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from penstock.shared.errors import PeerError
from penstock.shared.peers.handshake import Newcomers, Secret, admit_async
from penstock.shared.peers.keep_alive import keep_alive

log = logging.getLogger(__name__)

_STRANGERS = 64
_HANDSHAKE_S = 10.0


async def serve_peers(
    listener: socket.socket,
    secret: Secret,
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    purpose: str,
    ends: tuple[type[BaseException], ...] = (),
) -> None:
    """Call ``answer`` for each authenticated connection, until cancelled. Raises what it raises of ``ends``."""
    broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    connections: set[asyncio.Task[None]] = set()
    strangers = Newcomers(_STRANGERS)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            keep_alive(writer.get_extra_info("socket"))
            strangers.enter(writer, writer.close)
            async with asyncio.timeout(_HANDSHAKE_S):
                await admit_async(reader, writer, secret())
            strangers.leave(writer)
            await answer(reader, writer)
        except asyncio.CancelledError:
            return  # asyncio reports handlers that were cancelled as errors
        except ends as error:
            if not broken.done():
                broken.set_exception(error)
        except (PeerError, OSError, TimeoutError) as error:
            log.debug("a connection ended", extra={"purpose": purpose, "reason": str(error)})
        except Exception:
            log.exception("a connection broke", extra={"purpose": purpose})
        finally:
            strangers.leave(writer)
            connections.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, sock=listener)
    try:
        await broken
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
