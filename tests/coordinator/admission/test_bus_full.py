"""At maxmemory, nothing new is admitted, all in flight may leave, and the reason is reported."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.services.coordinator.admission.bus_full import Shortage
from penstock.services.coordinator.run.leader_lease import Lease
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Event, Experience, PolicyRecord, PolicyVersion, Prompt, RolloutGroup
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.errors import BusFull, SettingsError
from penstock.shared.process.telemetry import Presence, Status, tell
from tests.chaos.run import TcpServer, answers
from tests.conftest import PATIENCE_S, need, until
from tests.coordinator.admission.test_admission import admission
from tests.support import builders
from tests.support.coordinator_players import Trainer, make, replicas, running, settings
from tests.support.raw_redis import raw

FULL, ROOMY = "1mb", "0"


@pytest.fixture(params=["valkey", pytest.param("redis", marks=pytest.mark.debian)])
async def small(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    binary = need("redis-server", "redis-server") if request.param == "redis" else ""
    server = TcpServer(tmp_path / "data", binary)
    server.start()
    bus = None
    try:
        await until(lambda: answers(server.port))
        bus = await Bus.connect(server.url, "small", wait_s=PATIENCE_S)
        yield bus
    finally:
        if bus is not None:
            await bus.close()
        server.kill()


async def limit(bus: Bus, maxmemory: str) -> None:
    await raw(bus).config_set("maxmemory", maxmemory)


async def fill(bus: Bus) -> None:
    await raw(bus).set("ballast", b"x" * 2_000_000)
    await limit(bus, FULL)


async def started(bus: Bus) -> tuple[Ledger, Trainer]:
    ledger = Ledger(bus)
    await ledger.create()
    trainer = await Trainer(bus).start()
    (published,) = await bus.read(streams.PUBLISHED, PolicyRecord, "coordinator", 1, 1.0)
    assert await ledger.promote(published)
    await ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    return ledger, trainer


async def test_a_full_bus_takes_nothing_new_and_lets_everything_leave(small: Bus) -> None:
    ledger, trainer = await started(small)
    assert await ledger.admit([builders.prompt(group) for group in range(4)], 8, 2, 10, PolicyVersion(0)) == 4
    await fill(small)
    with pytest.raises(BusFull, match="raise its maxmemory"):
        await ledger.admit([builders.prompt(4)], 8, 2, 10, PolicyVersion(0))
    assert (await ledger.status()).cursor == 4, "nothing of it was admitted"

    prompts = await small.read(streams.PROMPTS, Prompt, "rollout", 8, 1.0)
    for prompt in prompts:
        assert await small.hand_over(prompt, streams.ROLLOUTS, builders.part(prompt.message()))
    groups = await small.read(streams.ROLLOUTS, RolloutGroup, "reward", 4, 1.0)
    assert await small.bury(groups[3], "too strange")
    for group in groups[:3]:
        assert await small.hand_over(group, streams.EXPERIENCE, builders.experience(int(group.group_id)))
    assert await trainer.step() == 1
    (last,) = await small.read(streams.EXPERIENCE, Experience, "trainer", 2, 1.0)
    assert await small.drop(last, "stale")
    await ledger.set_checkpoint(PolicyVersion(1), "/checkpoints/1")
    await ledger.trim_journal((await ledger.journal(""))[-1].entry)
    assert await small.counts() == {"trained": 2, "dropped:stale": 1, "dead:rollouts": 1}


async def test_a_full_bus_still_knows_who_is_there_and_who_leads(small: Bus) -> None:
    await fill(small)
    await small.make_groups()
    lease = Lease(small, "a", PATIENCE_S)
    await lease._claim(small)
    assert lease.leading
    stop = asyncio.Event()
    beating = asyncio.create_task(Presence(small, "reward", "reward-0", 0.05, Status(state="working")).run(stop))
    await until(lambda: _is_there(small, "reward-0"))
    stop.set()
    await beating
    await tell(small, "test", "it happened", "all the same")
    assert [event.name for _, event in await small.newest(streams.EVENTS, Event)] == ["it happened"]


async def _is_there(bus: Bus, replica: str) -> bool:
    return replica in [beat.replica for beat in await heartbeats(bus)]


async def test_admission_waits_for_memory_says_so_and_goes_on_by_itself(small: Bus) -> None:
    ledger, _ = await started(small)
    await fill(small)
    loop = asyncio.create_task(admission(small).run())
    try:
        await until(lambda: _is_full(ledger))
        assert (await ledger.status()).bus_full.startswith("admission waits for memory: the bus uses ")
        assert await small.length(streams.PROMPTS) == 0
        await limit(small, ROOMY)
        await until(lambda: _holds(small, streams.PROMPTS.name, 8))
        assert not await _is_full(ledger)
    finally:
        loop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loop
    events = [event.name for _, event in await small.newest(streams.EVENTS, Event, 10)]
    assert events == ["bus has room", "bus full"]


async def test_the_next_leader_knows_that_admission_waited(small: Bus) -> None:
    ledger = Ledger(small)
    await ledger.create()
    await fill(small)
    await Shortage(small, ledger).begin()
    next_one = Shortage(small, ledger)
    assert not await next_one.is_over()
    await limit(small, ROOMY)
    await until(next_one.is_over)
    assert (await ledger.status()).bus_full == ""


async def test_a_run_on_a_full_bus_says_what_it_waits_for(small: Bus, tmp_path: Path) -> None:
    async with running(make(small, settings(tmp_path, steps=50))) as parts, replicas(small):
        trainer = await Trainer(small).start()
        await trainer.step()
        await fill(small)
        await trainer.step()
        await until(lambda: _is_full(Ledger(small)))
        parts.monitor.forget()
        view = await parts.monitor.view()
        assert (view.state, view.activity) == (RunState.RUNNING, "waiting for memory on the bus")
        assert "raise maxmemory" in view.bus_full
        await limit(small, ROOMY)
        await trainer.step()


async def test_a_server_that_evicts_is_refused(small: Bus) -> None:
    await limit(small, "100mb")
    await raw(small).config_set("maxmemory-policy", "allkeys-lru")
    url = "redis://{host}:{port}".format(**raw(small).connection_pool.connection_kwargs)
    with pytest.raises(SettingsError, match="expected a server that never evicts, found maxmemory-policy allkeys-lru"):
        await Bus.connect(url, "small", wait_s=PATIENCE_S)


async def _is_full(ledger: Ledger) -> bool:
    return (await ledger.status()).bus_full != ""


async def _holds(bus: Bus, stream: str, count: int) -> bool:
    return int(await raw(bus).xlen(bus.keys.named(stream))) == count
