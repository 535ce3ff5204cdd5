"""Laws of the lease: one leads, another follows, old terms write nothing."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest

from penstock.services.coordinator.run.leader_lease import Lease
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from tests.conftest import PATIENCE_S, until
from tests.support import builders
from tests.support.coordinator_players import Trainer
from tests.support.raw_redis import raw

TTL_S = 0.6


class LongLease(Lease):
    """Looks as often as one of TTL_S, and is held for longer, so that a busy machine does not lose it."""

    async def _claim(self, bus: Bus) -> None:
        self._ttl_s = PATIENCE_S
        try:
            await super()._claim(bus)
        finally:
            self._ttl_s = TTL_S


class Leader:
    """Notes its terms, and leads until stopped."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.lease: Lease = LongLease(bus, name, TTL_S)
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
    await dead._claim(bus)
    assert dead.term == 1
    async with next_one.running():
        await until(lambda: next_one.terms == [2])
    assert not dead.leading, "by its own clock too"


async def test_a_process_started_again_under_its_name_leads_at_once_under_the_next_term(bus: Bus) -> None:
    before, after = Lease(bus, "a", TTL_S), Lease(bus, "a", TTL_S)
    await before._claim(bus)
    await after._claim(bus)
    assert (before.term, after.term) == (1, 2)


async def test_a_leader_of_an_older_term_neither_admits_nor_promotes(bus: Bus) -> None:
    ledger = Ledger(bus)
    await ledger.create()
    trainer = await Trainer(bus).start()
    await ledger.transition(RunState.RUNNING, "test", [RunState.CREATED])
    frozen, next_one = Lease(bus, "a", TTL_S), LongLease(bus, "b", TTL_S)
    await frozen._claim(bus)
    old, new = Ledger(bus), Ledger(bus)
    old.term = frozen.term
    await until(lambda: _follows(next_one, bus))
    new.term = next_one.term
    published = await bus.read(streams.PUBLISHED, PolicyRecord, "coordinator", 1, 1.0)
    prompts = [builders.prompt(group_id) for group_id in range(2)]
    assert await old.admit(prompts, 4, 2, 10, PolicyVersion(0)) == -1
    assert not await old.promote(published[0])
    assert (await ledger.status()).head is None
    assert await new.promote(published[0])
    await new.note("doing", "evaluating version 0")
    await old.note("doing", "ending: writing the report")
    assert (await ledger.status()).doing == "evaluating version 0"
    assert await new.admit(prompts, 4, 2, 10, PolicyVersion(0)) == 2
    assert trainer.epoch == 1


async def _follows(lease: Lease, bus: Bus) -> bool:
    await lease._claim(bus)
    return lease.leading


async def test_a_leader_whose_event_loop_is_held_up_for_a_moment_renews_its_lease(bus: Bus) -> None:
    leader = Leader(bus, "a")
    async with leader.running():
        await until(lambda: leader.terms == [1])
        until_s = leader.lease._until_s
        _hold_up_until(lambda: leader.lease._until_s > until_s)
        assert leader.lease.leading
    assert leader.terms == [1]


async def test_a_leader_whose_event_loop_is_held_up_for_long_loses_its_lease_to_another(bus: Bus) -> None:
    held_up, next_one = Leader(bus, "a"), Leader(bus, "b")
    held_up.lease = Lease(bus, "a", TTL_S, held_up_s=2 * TTL_S)
    async with held_up.running():
        await until(lambda: held_up.terms == [1])
        _hold_up_until(lambda: not held_up.lease.leading)
        async with next_one.running():
            await until(lambda: next_one.terms != [])


def _hold_up_until(holds: Callable[[], bool]) -> None:
    """Keep this event loop from running, as a long computation does."""
    end_s = time.monotonic() + PATIENCE_S
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert holds()


async def test_what_fails_while_leading_ends_the_claim(bus: Bus) -> None:
    async def fail(term: int) -> None:
        raise RuntimeError("a bug")

    lease = LongLease(bus, "a", TTL_S)
    with pytest.raises(RuntimeError, match="a bug"):
        await lease.run(fail)
    other = LongLease(bus, "b", TTL_S)
    await other._claim(bus)
    assert other.leading, "it left the lease at once"


async def test_a_leader_whose_bus_came_back_empty_leads_under_the_term_that_it_gets_there(bus: Bus) -> None:
    leader = Leader(bus, "a")
    await raw(bus).hset(bus.keys.named("run"), "leader_term", 6)
    async with leader.running():
        await until(lambda: leader.terms == [7])
        await raw(bus).delete(bus.keys.named("run"), bus.keys.named("lease"))
        await until(lambda: leader.terms == [7, 1])


async def test_loops_that_do_not_end_when_they_are_cancelled_end_the_coordinator_and_not_its_run(bus: Bus) -> None:
    may_end = asyncio.Event()

    async def lead(term: int) -> None:
        while not may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await may_end.wait()

    lease = Lease(bus, "a", TTL_S, close_s=0.1)
    running = asyncio.create_task(lease.run(lead))
    await until(lambda: lease.leading)
    await raw(bus).hset(bus.keys.named("lease"), mapping={"replica": "b", "process": "b"})
    try:
        with pytest.raises(RuntimeError, match="the loops of term 1 have not ended"):
            await running
    finally:
        may_end.set()


async def test_a_coordinator_that_is_told_to_stop_does_not_follow_the_one_that_took_its_lease(bus: Bus) -> None:
    lease, stop = Lease(bus, "a", TTL_S), asyncio.Event()

    async def lead(term: int) -> None:
        await asyncio.Event().wait()

    running = asyncio.create_task(lease.run(lead, stop))
    await until(lambda: lease.leading)
    stop.set()
    await raw(bus).hset(bus.keys.named("lease"), mapping={"replica": "b", "process": "b"})
    async with asyncio.timeout(PATIENCE_S):
        await running
