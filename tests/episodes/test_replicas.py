"""Connections of the episodes service to the replicas that draw its turns."""

import asyncio
import socket
import struct

import numpy as np
import pytest

from penstock.services.episodes.replicas import Replicas, _Connection, _hang_up, _idle, _Replica
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import FinishReason, PolicyVersion, no_ids
from penstock.shared.peers import frames
from penstock.shared.peers.server import serve_peers
from penstock.shared.peers.turns import DrawnTurn, TurnRequest
from tests.support.builders import prompt
from tests.support.waits import PATIENCE_S, until


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


async def test_the_longest_turn_with_the_tokens_that_could_be_drawn_arrives(bus: Bus) -> None:
    """131,072 tokens with sampling.top_k = 256: a frame that is refused would be asked for again without end."""
    sizes = np.full(131_072, 256, np.int32)
    spans, ids = np.zeros((1, 2), np.int32), np.zeros(131_072 * 256, np.int32)
    turn = DrawnTurn(sizes, np.zeros(131_072, np.float32), spans, FinishReason.LENGTH, sizes, ids)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await frames.receive_async(reader)
        writer.write(frames.pack({**turn.frame(), "running": 1}))
        await writer.drain()

    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(serve_peers(listener, lambda: b"secret", answer, "turns"))
    replicas = Replicas(bus, lambda: b"secret")
    replicas._known["rollout-0"] = _Replica(f"127.0.0.1:{listener.getsockname()[1]}", PolicyVersion(0))
    request = TurnRequest(prompt(0), no_ids(), 0, PolicyVersion(0))
    drawn, name = await asyncio.wait_for(replicas.draw(request, ""), PATIENCE_S)
    assert (name, len(drawn.support_ids)) == ("rollout-0", 131_072 * 256)
    _hang_up(replicas._known["rollout-0"])
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
