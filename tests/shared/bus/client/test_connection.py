"""Commands over connections that are kept beside redis-py's pool."""

import asyncio
from typing import Any

import pytest

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.client import connection
from tests.support.raw_redis import raw


@pytest.fixture
def client(bus: Bus) -> Any:
    return raw(bus)


async def test_the_answer_of_a_cancelled_command_reaches_no_other(client: Any) -> None:
    await client.execute_command("SET", "cancelled:key", "mine")
    for turns in range(12):  # from before the connection to the wait for the answer
        waiting = asyncio.create_task(client.execute_command("BLPOP", "cancelled:list", 0))
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert await client.execute_command("GET", "cancelled:key") == b"mine"


async def test_errors_have_the_places_of_their_commands_and_the_connection_continues(client: Any) -> None:
    await client.execute_command("SET", "errors:text", "a")
    together = client.pipeline(transaction=False)
    for words in (("GET", "errors:text"), ("INCR", "errors:text"), ("STRLEN", "errors:text")):
        together.execute_command(*words)
    first, error, last = await together.execute(raise_on_error=False)
    assert (first, last) == (b"a", 1)
    assert "not an integer" in str(error)
    with pytest.raises(type(error), match="not an integer"):
        await client.execute_command("INCR", "errors:text")
    assert await client.execute_command("GET", "errors:text") == b"a"


async def test_more_commands_at_once_than_connections_are_kept_all_get_their_own_answers(client: Any) -> None:
    answers = await asyncio.gather(*(client.execute_command("ECHO", f"word {number}") for number in range(200)))
    assert answers == [f"word {number}".encode() for number in range(200)]


async def test_a_command_larger_than_the_sockets_buffer_arrives_whole(client: Any) -> None:
    await client.execute_command("SET", "large", b"x" * (32 << 20))
    assert await client.execute_command("STRLEN", "large") == 32 << 20
    await client.execute_command("DEL", "large")


async def test_connections_are_given_in_the_order_in_which_they_are_asked_for(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_MOST_CONNECTIONS", 1)
    client = connection.open_client(bus._url)

    async def append(name: str, times: int) -> None:
        for _ in range(times):
            await client.execute_command("RPUSH", "order:list", name)

    async with asyncio.TaskGroup() as tasks:
        for name in "abc":
            tasks.create_task(append(name, 3))
        cancelled = tasks.create_task(append("x", 1))
        tasks.create_task(append("d", 3))
        await asyncio.sleep(0)
        cancelled.cancel()
    assert b"".join(await client.execute_command("LRANGE", "order:list", 0, -1)) == b"abcd" * 3
    await connection.close_client(client)
