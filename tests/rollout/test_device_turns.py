"""Laws of a guest's turns: it works only while the device is its own, and what it keeps does not wait longer than a step."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from services.rollout.device_turns import DeviceTurns
from shared.bus.bus import Bus
from shared.bus.encoding import wire
from shared.bus.keys import RUN
from shared.bus.messages import Prompt, RolloutGroup
from shared.bus.stores.replicas.device_leases import ask_back, grant_devices, look_at_devices
from shared.bus.streams import PROMPTS, ROLLOUTS
from shared.bus.worker import Patience, Worker
from shared.process.device import DeviceLease
from shared.process.telemetry import Status
from tests.conftest import PATIENCE_S, until
from tests.support import builders
from tests.support.raw_redis import raw


class Engine:
    """Suspends and resumes; generates nothing."""

    version = 7

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.memory: dict[str, float] = {}

    async def suspend(self, rung: int) -> None:
        self.calls.append(f"suspend {rung}")

    async def resume(self) -> None:
        self.calls.append("resume")


class Guest:
    """A replica whose prompts are never answered while ``answers`` is not set."""

    def __init__(self, bus: Bus) -> None:
        self.newest_step = 0
        self.max_lag = 1
        self.generated = (5, 50)
        self.answers = asyncio.Event()
        self.taking = asyncio.Event()
        patience = Patience(claim_after_s=PATIENCE_S, drain_s=0.1)
        self.worker = Worker(
            bus, "guest-0", PROMPTS, Prompt, ROLLOUTS, self._answer, 8, patience, self.taking, block_s=0.05
        )

    async def _answer(self, prompt: Prompt) -> RolloutGroup:
        await self.answers.wait()
        return builders.group(prompt.group_id)

    async def evaluated(self) -> None: ...

    def opened(self) -> None:
        self.taking.set()

    def closed(self) -> None:
        self.taking.clear()

    async def hand_back(self) -> None:
        await self.worker.hand_back()


@contextlib.asynccontextmanager
async def playing(
    bus: Bus, guest: Guest, engine: Engine, lease: DeviceLease, status: Status | None = None
) -> AsyncIterator[None]:
    turns = DeviceTurns(lease, engine, status or Status(), max_lag=lambda: guest.max_lag)  # type: ignore[arg-type]
    stop = asyncio.Event()
    tasks = [asyncio.create_task(work) for work in (lease.keep(), turns.run(guest), guest.worker.run(stop))]
    try:
        yield
    finally:
        stop.set()
        for task in tasks[:2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def grant(bus: Bus) -> int:
    """Grant what is requested; return the term."""
    requests = (await look_at_devices(bus, 1)).requests
    return await grant_devices(bus, 1, requests[0], PATIENCE_S) if requests else 0


async def _is_free(bus: Bus) -> bool:
    return (await look_at_devices(bus, 1)).grants[0] is None


async def put(bus: Bus, *group_ids: int) -> None:
    for group_id in group_ids:
        await bus.append(PROMPTS, {"id": str(group_id), "data": wire.encode(builders.prompt(group_id))})


@pytest.mark.parametrize("max_lag", [1, 2])
async def test_a_guest_pauses_takes_nothing_while_away_and_hands_back_what_will_be_stale(
    bus: Bus, max_lag: int
) -> None:
    await raw(bus).hset(bus.keys.of(RUN), "leader_term", 1)
    guest, engine, lease = Guest(bus), Engine(), DeviceLease(bus, "guest-0", "load", (0,), PATIENCE_S)
    await put(bus, 0, 1)
    async with playing(bus, guest, engine, lease):
        await until(lambda: grant(bus))
        await until(lambda: guest.worker.held == 2)
        guest.generated = (8, 62)
        await ask_back(bus, 1, 0, lease.term, 1)
        await until(lambda: _is_free(bus) if guest.worker.resting else False)
        assert engine.calls == ["resume", "suspend 1"]
        figures = await raw(bus).hmget(bus.keys.named("device:0"), "samples", "tokens", "freed")
        assert figures == [b"3", b"12", b"1"]
        await put(bus, 2)
        guest.max_lag = guest.newest_step = max_lag
        assert not await lease.acquire(1.2)
        assert guest.worker.held == 2, "as many steps as samples may lag: they wait in the engine"
        guest.newest_step = max_lag + 1
        await until(lambda: guest.worker.held == 0)
        assert await bus.length(PROMPTS) == 3, "another replica generates them, and what the guest never took"
        other = await bus.reclaim(PROMPTS, Prompt, "rollout-0", PATIENCE_S, 8)
        assert sorted((delivery.group_id, delivery.attempts) for delivery in other) == [("0", 1), ("1", 1)]
        await until(lambda: grant(bus))
        await until(lambda: guest.worker.held == 1)
        guest.answers.set()
        await until(lambda: guest.worker.held == 0)
        assert engine.calls == ["resume", "suspend 1", "resume"]


async def test_a_guest_continues_in_its_next_turn_what_it_paused(bus: Bus) -> None:
    await raw(bus).hset(bus.keys.of(RUN), "leader_term", 1)
    guest, engine, lease = Guest(bus), Engine(), DeviceLease(bus, "guest-0", "load", (0,), PATIENCE_S)
    status = Status()
    await put(bus, 0)
    async with playing(bus, guest, engine, lease, status):
        for cache in (2.0, 9.0, 3.0):
            engine.memory = {"kv_cache": cache}
            await until(lambda: grant(bus))
            await until(lambda: lease.held and guest.worker.held == 1)
            await ask_back(bus, 1, 0, lease.term, 4)
            await until(lambda: not lease.held)
        guest.answers.set()
        await until(lambda: guest.worker.held == 0)
    assert status.values["memory_kv_cache"] == 9.0, "the most that it has held"
    (row,) = await raw(bus).xrange(bus.keys.of(ROLLOUTS))
    assert row[1][b"id"] == b"0"
