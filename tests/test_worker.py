"""Laws of the worker, on a real Valkey."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from shared import wire
from shared.bus import Bus
from shared.errors import NotHere, PermanentError, TemporaryError
from shared.messages import Prompt, RolloutGroup
from shared.streams import PROMPTS, ROLLOUTS
from shared.worker import Patience, Worker
from tests import builders
from tests.conftest import PATIENCE_S, until

QUICK = Patience(claim_after_s=0.6, max_attempts=3, retry_s=0.01, drain_s=5.0)
Handler = Callable[[Prompt], Awaitable[RolloutGroup]]


async def answer(prompt: Prompt) -> RolloutGroup:
    return builders.group(prompt.group_id)


def make(
    bus: Bus, handler: Handler, name: str = "a", patience: Patience = QUICK, concurrency: int = 2
) -> Worker[Prompt, RolloutGroup]:
    return Worker(bus, name, PROMPTS, Prompt, ROLLOUTS, handler, concurrency, patience)


@asynccontextmanager
async def running(worker: Worker[Prompt, RolloutGroup]) -> AsyncIterator[asyncio.Event]:
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    try:
        yield stop
    finally:
        stop.set()
        await task


async def put(bus: Bus, count: int) -> None:
    for group_id in range(count):
        await bus.append(PROMPTS, {"id": str(group_id), "data": wire.encode(builders.prompt(group_id))})


async def outputs(bus: Bus) -> list[str]:
    return sorted(fields[b"id"].decode() for _, fields in await bus.client.xrange(bus.keys.of(ROLLOUTS)))


async def test_every_entry_becomes_one_result(bus: Bus) -> None:
    await put(bus, 20)
    async with running(make(bus, answer, "a")), running(make(bus, answer, "b")):
        await until(lambda: _is_length(bus, 20))
    assert await outputs(bus) == sorted(str(i) for i in range(20))
    assert await bus.length(PROMPTS) == 0


async def _is_length(bus: Bus, count: int) -> bool:
    return await bus.length(ROLLOUTS) == count


async def test_no_more_than_concurrency_are_handled_at_once(bus: Bus) -> None:
    most, now = 0, 0

    async def count(prompt: Prompt) -> RolloutGroup:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return await answer(prompt)

    await put(bus, 30)
    async with running(make(bus, count, concurrency=3)):
        await until(lambda: _is_length(bus, 30))
    assert most <= 3


async def test_what_an_earlier_process_left_is_done_with_no_more_than_concurrency_at_once(bus: Bus) -> None:
    most, now = 0, 0

    async def count(prompt: Prompt) -> RolloutGroup:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return await answer(prompt)

    await put(bus, 11)
    assert len(await bus.read(PROMPTS, Prompt, "a", 11, None)) == 11
    patient = dataclasses.replace(QUICK, claim_after_s=PATIENCE_S)  # so that nothing comes back by being reclaimed
    async with running(make(bus, count, patience=patient, concurrency=3)):
        await until(lambda: _is_length(bus, 11))
    assert most == 3


async def test_a_temporary_failure_is_tried_again_and_then_buried_with_its_reason(bus: Bus) -> None:
    tries = 0

    async def fail(prompt: Prompt) -> RolloutGroup:
        nonlocal tries
        tries += 1
        raise TemporaryError("the scorer is down")

    await put(bus, 1)
    worker = make(bus, fail)
    async with running(worker):
        await until(lambda: worker.counts.buried == 1)
    assert tries == 3
    ((_, dead),) = await bus.client.xrange(bus.keys.of(PROMPTS.dead))
    assert (dead[b"reason"], dead[b"attempts"]) == (b"the scorer is down", b"3")
    assert await bus.length(ROLLOUTS) == 0


async def test_what_this_replica_cannot_do_is_left_to_another_however_often_and_is_never_buried(bus: Bus) -> None:
    tries = 0

    async def behind(prompt: Prompt) -> RolloutGroup:
        nonlocal tries
        tries += 1
        raise NotHere("the weights cannot be pulled here")

    await put(bus, 1)
    worker = make(bus, behind, "behind")
    async with running(worker):
        await until(lambda: tries > 3)  # more than it may be tried
    assert worker.counts.buried == 0
    async with running(make(bus, answer, "able")):
        await until(lambda: _is_length(bus, 1))


async def test_a_temporary_failure_that_passes_ends_in_one_result(bus: Bus) -> None:
    tries = 0

    async def fail_once(prompt: Prompt) -> RolloutGroup:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise TemporaryError("not yet")
        return await answer(prompt)

    await put(bus, 1)
    async with running(make(bus, fail_once)):
        await until(lambda: _is_length(bus, 1))
    assert tries == 2


async def test_a_permanent_failure_is_buried_at_once(bus: Bus) -> None:
    async def refuse(prompt: Prompt) -> RolloutGroup:
        raise PermanentError("expected an answer, found none")

    await put(bus, 1)
    worker = make(bus, refuse)
    async with running(worker):
        await until(lambda: worker.counts.buried == 1)
    ((_, dead),) = await bus.client.xrange(bus.keys.of(PROMPTS.dead))
    assert (dead[b"reason"], dead[b"attempts"]) == (b"expected an answer, found none", b"1")


async def test_noise_on_the_stream_is_buried_and_the_next_entry_is_handled(bus: Bus) -> None:
    await bus.append(PROMPTS, {"id": "9", "data": b"noise"})
    await put(bus, 1)
    async with running(make(bus, answer)):
        await until(lambda: _is_length(bus, 1))
    assert await bus.length(PROMPTS.dead) == 1


async def test_a_bug_stops_the_worker_and_leaves_the_entry_to_others(bus: Bus) -> None:
    async def crash(prompt: Prompt) -> RolloutGroup:
        raise ZeroDivisionError

    await put(bus, 1)
    with pytest.raises(ZeroDivisionError):
        await make(bus, crash).run(asyncio.Event())
    (delivery,) = await bus.reclaim(PROMPTS, Prompt, "b", min_idle_s=3600.0, count=1)
    assert delivery.attempts == 2, "an entry that stops its handlers is buried in the end"


async def test_a_long_handler_keeps_its_entry(bus: Bus) -> None:
    go_on = asyncio.Event()

    async def slow(prompt: Prompt) -> RolloutGroup:
        await go_on.wait()
        return await answer(prompt)

    await put(bus, 1)
    slow_worker, eager = make(bus, slow, "slow"), make(bus, answer, "eager")
    async with running(slow_worker):
        await until(lambda: slow_worker.held == 1)
        async with running(eager):
            await asyncio.sleep(3 * QUICK.claim_after_s)  # three lifetimes of an entry that nobody renews
            assert eager.counts.reclaimed == 0
        go_on.set()
        await until(lambda: slow_worker.counts.handed_over == 1)
    assert await outputs(bus) == ["0"]


async def test_a_stopped_worker_finishes_what_it_holds(bus: Bus) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def slow(prompt: Prompt) -> RolloutGroup:
        started.set()
        await go_on.wait()
        return await answer(prompt)

    await put(bus, 1)
    worker, stop = make(bus, slow), asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    await started.wait()
    stop.set()
    await asyncio.sleep(0)
    go_on.set()
    await task
    assert worker.counts.handed_over == 1


async def test_a_stopped_worker_gives_back_what_it_cannot_finish(bus: Bus) -> None:
    started = asyncio.Event()

    async def endless(prompt: Prompt) -> RolloutGroup:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    await put(bus, 1)
    worker, stop = make(bus, endless, patience=Patience(claim_after_s=60.0, drain_s=0.05)), asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    await started.wait()
    stop.set()
    await task
    assert worker.counts.given_back == 1
    (delivery,) = await bus.reclaim(PROMPTS, Prompt, "b", min_idle_s=3600.0, count=1)
    assert delivery.attempts == 1, "giving back costs no attempt"


async def test_an_entry_that_killed_its_consumers_is_buried_before_it_is_handled(bus: Bus) -> None:
    await put(bus, 1)
    for consumer in ("a", "b", "c"):
        if consumer == "a":
            await bus.read(PROMPTS, Prompt, consumer, 1, block_s=0.1)
        else:
            await bus.reclaim(PROMPTS, Prompt, consumer, min_idle_s=0.0, count=1)
    worker = make(bus, answer, "d", Patience(claim_after_s=0.05, max_attempts=3))
    async with running(worker):
        await until(lambda: worker.counts.buried == 1)
    assert worker.counts.handed_over == 0
