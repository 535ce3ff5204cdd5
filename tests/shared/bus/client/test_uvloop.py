"""On the coordinator's event loop, too, a lost connection is waited for."""

from typing import Any

import pytest
import uvloop

from penstock.shared.bus.client.connection import close_client, open_client
from penstock.shared.bus.client.server import Server
from tests.conftest import Server as Started


def test_a_connection_that_closes_just_before_a_command_is_written_is_a_lost_one(server: Started) -> None:
    assert uvloop.run(_reconnects(server.url)) == 1


def test_another_runtime_error_is_raised(server: Started) -> None:
    async def fails() -> None:
        raise RuntimeError("expected a step, found none")

    with pytest.raises(RuntimeError, match="found none"):
        uvloop.run(_called(server.url, fails))


async def _called(url: str, command: Any) -> None:
    client = open_client(url)
    try:
        await Server(client).call(command)
    finally:
        await close_client(client)


async def _reconnects(url: str) -> int:
    client: Any = open_client(url)
    server = Server(client)
    await server.call(lambda: client.execute_command("PING"))
    connection = await client.connection_pool.get_connection()
    connection._writer.transport.abort()
    before = server.reconnects

    async def ping() -> Any:
        if server.available:
            await connection.send_command("PING")
        return await client.execute_command("PING")

    try:
        assert await server.call(ping)
        return server.reconnects - before
    finally:
        await close_client(client)
