"""Connections of the episodes service to the replicas that draw its turns."""

import asyncio
import socket
import struct

import pytest

from penstock.services.episodes.replicas import _Connection, _idle, _Replica
from penstock.shared.bus.messages import PolicyVersion
from tests.support.waits import until


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_connection_that_its_replica_has_closed_draws_no_turn(is_reset: bool) -> None:
    """A turn that began after the replica's death would count as drawn again."""
    accepted: list[asyncio.StreamWriter] = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)

    async with await asyncio.start_server(keep, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        open_one, closed = [_Connection(*await asyncio.open_connection(host, port)) for _ in range(2)]
        replica = _Replica(f"{host}:{port}", PolicyVersion(1), idle=[open_one, closed])
        await until(lambda: len(accepted) == 2)
        of_closed = next(
            each for each in accepted if each.get_extra_info("peername") == closed.writer.get_extra_info("sockname")
        )
        if is_reset:
            raw: socket.socket = of_closed.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        of_closed.close()
        await until(lambda: closed.reader.at_eof() or closed.writer.is_closing())
        assert _idle(replica) is open_one
        assert _idle(replica) is None
        open_one.writer.close()
        accepted[0].close()
        accepted[1].close()
