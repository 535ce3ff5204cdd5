"""Laws of the lease: one leads, the next follows soon, and an old term writes nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from services.coordinator.lease import Lease
from shared.bus import Bus
from tests.conftest import until

TTL_S = 0.6


class Leader:
    """Notes the terms under which it leads, and leads until it is told not to."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.lease = Lease(bus, name, TTL_S)
        self.terms: list[int] = []

    async def lead(self, term: int) -> None:
        self.terms.append(term)
        await asyncio.Event().wait()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.lease.run(self.lead))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_one_leads_and_the_other_knows_whom_until_it_leaves(bus: Bus) -> None:
    first, second = Leader(bus, "a"), Leader(bus, "b")
    async with contextlib.AsyncExitStack() as stack:
        leading = await stack.enter_async_context(first.running())
        await until(lambda: first.terms == [1])
        await stack.enter_async_context(second.running())
        await until(lambda: second.lease.leader == "a")
        assert second.terms == []
        leading.cancel()
        await until(lambda: second.terms == [2])
        assert not first.lease.leading


async def test_a_leader_that_dies_is_followed_when_its_lease_has_run_out(bus: Bus) -> None:
    dead, next_one = Lease(bus, "a", TTL_S), Leader(bus, "b")
    await dead._claim()
    assert dead.leading
    async with next_one.running():
        await until(lambda: next_one.terms == [2])
    assert not dead.leading, "by its own clock too"


async def test_a_process_started_again_under_its_name_is_another_holder(bus: Bus) -> None:
    before, after = Lease(bus, "a", TTL_S), Lease(bus, "a", TTL_S)
    await before._claim()
    await after._claim()
    assert (before.term, after.term) == (1, 0)


async def test_what_fails_while_leading_ends_the_claim(bus: Bus) -> None:
    async def fail(term: int) -> None:
        raise RuntimeError("a bug")

    lease = Lease(bus, "a", TTL_S)
    with pytest.raises(RuntimeError, match="a bug"):
        await lease.run(fail)
    other = Lease(bus, "b", TTL_S)
    await other._claim()
    assert other.leading, "it left the lease at once"
