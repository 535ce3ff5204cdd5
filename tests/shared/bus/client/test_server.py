"""Commands that are asked in one iteration of the event loop go to the server together; a lost connection is waited for."""

import asyncio
from typing import Any

import pytest
from redis.exceptions import ConnectionError, ResponseError

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.client.server import Together

pytestmark = pytest.mark.asyncio


class Counting:
    """The client of a real server; counts round trips."""

    def __init__(self, bus: Bus) -> None:
        self.client: Any = bus._client
        self.trips = 0
        self.is_lost = False

    async def execute_command(self, *words: Any) -> Any:
        self._trip()
        return await self.client.execute_command(*words)

    def pipeline(self, transaction: bool) -> Any:
        self._trip()
        return self.client.pipeline(transaction=transaction)

    def _trip(self) -> None:
        self.trips += 1
        if self.is_lost:
            raise ConnectionError("lost")


@pytest.fixture
def client(bus: Bus) -> Any:
    return Counting(bus)


async def test_each_caller_gets_its_own_answer_or_error(bus: Bus, client: Any) -> None:
    together, name = Together(client), bus.keys.named("count")
    wrong = together.execute("HGET", name, "field")
    answers = await asyncio.gather(*(together.execute("INCR", name) for _ in range(100)), wrong, return_exceptions=True)
    assert answers[:100] == list(range(1, 101))
    assert isinstance(answers[100], ResponseError)
    assert client.trips == 2  # of at most 64
    assert await together.execute("GET", name) == b"100"
    assert client.trips == 3


async def test_a_caller_that_is_cancelled_takes_no_answer_from_others(bus: Bus, client: Any) -> None:
    together, name = Together(client), bus.keys.named("count")
    asked = [asyncio.create_task(together.execute("INCR", name)) for _ in range(3)]
    await asyncio.sleep(0)
    asked[1].cancel()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert answers[0] == 1
    assert isinstance(answers[1], asyncio.CancelledError)
    assert answers[2] == 3


async def test_a_lost_connection_is_an_error_of_all_and_of_nobody_later(bus: Bus, client: Any) -> None:
    together, name = Together(client), bus.keys.named("count")
    client.is_lost = True
    answers = await asyncio.gather(*(together.execute("INCR", name) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [ConnectionError] * 3
    client.is_lost = False
    assert await together.execute("INCR", name) == 1


async def test_what_is_cancelled_before_it_is_sent_stops_nobody_later(bus: Bus, client: Any) -> None:
    together, name = Together(client), bus.keys.named("count")
    first = asyncio.create_task(together.execute("INCR", name))
    await asyncio.sleep(0)
    (sending,) = together._sending
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await together.execute("INCR", name) == 1
