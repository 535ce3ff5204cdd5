"""A sample that could not be made is dropped if half of its group and two are left."""

import asyncio
import dataclasses

import pytest

from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion, Prompt, RolloutGroup
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.worker import Patience, Worker
from penstock.shared.errors import TemporaryError
from tests.conftest import until
from tests.support import builders
from tests.support.raw_redis import raw


@pytest.mark.parametrize(("failing", "left"), [({1}, [0, 2, 3]), ({0, 3}, [1, 2]), ({0, 1, 3}, None)])
async def test_a_group_goes_on_without_samples_or_ends_as_one(
    bus: Bus, failing: set[int], left: list[int] | None
) -> None:
    async def handle(prompt: Prompt) -> RolloutGroup:
        if prompt.sample in failing:
            raise TemporaryError("no sandbox is free")
        return builders.part(prompt, version=int(prompt.sample or 0))

    await raw(bus).hset(bus.keys.named("run"), mapping={"state": "running", "newest_version": 0})
    prompt = dataclasses.replace(builders.prompt(samples=4), environment="my:Own")
    assert await Ledger(bus).admit([prompt], 10, 1, 10, PolicyVersion(0)) == 1
    worker = Worker(
        bus, "one", streams.EPISODES, Prompt, streams.ROLLOUTS, handle, 8, Patience(max_attempts=2, retry_s=0.01)
    )
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))

    async def ended() -> bool:
        return not await bus.length(streams.EPISODES)

    await until(ended)
    stop.set()
    await task
    groups = [entry.message() for entry in await bus.read(streams.ROLLOUTS, RolloutGroup, "test", 9, 0.01)]
    made = [[int(sample.oldest_version) for sample in group.samples] for group in groups]
    assert made == ([] if left is None else [left])
    assert await bus.length(streams.EPISODES.dead) == int(left is None)
    assert await Ledger(bus).in_flight() == len(groups)
    assert [key async for key in raw(bus).scan_iter(f"{bus.keys.named('assembly')}:*")] == []
    assert (await bus.counts()).get("dead:episodes", 0) == int(left is None)
