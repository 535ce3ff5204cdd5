"""Laws of a replica's turns: what it generates waits while others use its device, and continues."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import RUN
from penstock.shared.bus.messages import Prompt, RolloutGroup
from penstock.shared.bus.stores.replicas.device_leases import ask_back, grant_devices, look_at_devices
from penstock.shared.bus.streams import PROMPTS, ROLLOUTS
from penstock.shared.bus.worker import Patience, Worker
from penstock.shared.placement.lease import DeviceLease
from penstock.shared.placement.turns import ReplicaTurns
from penstock.shared.process.telemetry import Status
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


class Replica:
    """A replica whose prompts are never answered while ``answers`` is not set."""

    def __init__(self, bus: Bus, calls: list[str]) -> None:
        self.answers = asyncio.Event()
        patience = Patience(claim_after_s=PATIENCE_S, drain_s=0.1)
        self.worker = Worker(bus, "rollout-0", PROMPTS, Prompt, ROLLOUTS, self._answer, 8, patience)
        self._calls = calls

    async def _answer(self, prompt: Prompt) -> RolloutGroup:
        await self.answers.wait()
        return builders.group(prompt.group_id)

    async def evaluated(self) -> None:
        self._calls.append("evaluated")

    def opened(self) -> None: ...


@contextlib.asynccontextmanager
async def playing(
    bus: Bus, replica: Replica, engine: Engine, lease: DeviceLease, status: Status
) -> AsyncIterator[None]:
    turns = ReplicaTurns(lease, status)
    stop = asyncio.Event()
    tasks = [asyncio.create_task(work) for work in (lease.keep(), turns.run(replica, engine), replica.worker.run(stop))]
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


async def test_a_replica_continues_in_its_next_turn_what_it_paused(bus: Bus) -> None:
    await raw(bus).hset(bus.keys.of(RUN), "leader_term", 1)
    engine, lease = Engine(), DeviceLease(bus, "rollout-0", "generate", (0,), PATIENCE_S)
    replica, status = Replica(bus, engine.calls), Status()
    await bus.append(PROMPTS, {"id": "0", "data": wire.encode(builders.prompt(0))})
    async with playing(bus, replica, engine, lease, status):
        for cache, rung in ((2.0, 1), (9.0, 2), (3.0, 4)):
            engine.memory = {"kv_cache": cache}
            await until(lambda: grant(bus))
            await until(lambda: lease.held and replica.worker.held == 1)
            await ask_back(bus, 1, 0, lease.term, rung)
            await until(lambda: not lease.held)
        replica.answers.set()
        await until(lambda: replica.worker.held == 0)
    steps = ["resume", "suspend 1", "resume", "evaluated", "suspend 2", "resume", "evaluated", "suspend 4"]
    assert engine.calls == steps, "from rung 2 on, an evaluation ends before the weights are discarded"
    assert status.values["memory_kv_cache"] == 9.0, "the most that it has held"
    assert await raw(bus).hget(bus.keys.named("device:0"), "freed") == b"4"
    assert int(await raw(bus).hget(bus.keys.named("device:0"), "switch_ms")) >= 0
    (row,) = await raw(bus).xrange(bus.keys.of(ROLLOUTS))
    assert row[1][b"id"] == b"0"
