"""Laws of the worker."""

import asyncio
import dataclasses
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.shared.bus.bus import Bus, Delivery, EntryId
from penstock.shared.bus.client import server as bus_server
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Prompt, RolloutGroup
from penstock.shared.bus.streams import PROMPTS, ROLLOUTS, Stream
from penstock.shared.bus.worker import Patience, Worker
from penstock.shared.errors import NotHere, PermanentError, StateLost, TemporaryError
from tests.conftest import PATIENCE_S, Server, until
from tests.support import builders
from tests.support.raw_redis import raw

PATIENT = Patience(claim_after_s=PATIENCE_S, max_attempts=3, retry_s=0.01, drain_s=PATIENCE_S)
"""On a busy machine, an entry that nobody renews for less may still be worked on."""
QUICK = dataclasses.replace(PATIENT, claim_after_s=0.6)
Handler = Callable[[Prompt], Awaitable[RolloutGroup]]


async def answer(prompt: Prompt) -> RolloutGroup:
    return builders.group(prompt.group_id)


def make(
    bus: Bus, handler: Handler, name: str = "a", patience: Patience = PATIENT, concurrency: int = 2, unit: int = 0
) -> Worker[Prompt, RolloutGroup]:
    return Worker(bus, name, PROMPTS, Prompt, ROLLOUTS, handler, concurrency, patience, unit=unit)


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
    return sorted(fields[b"id"].decode() for _, fields in await raw(bus).xrange(bus.keys.of(ROLLOUTS)))


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


async def test_workers_share_what_is_there_in_whole_units(bus: Bus) -> None:
    taken: dict[str, list[int]] = {"a": [], "b": []}
    let_go = asyncio.Event()

    def take(name: str) -> Handler:
        async def taking(prompt: Prompt) -> RolloutGroup:
            taken[name].append(int(prompt.group_id))
            await let_go.wait()
            return await answer(prompt)

        return taking

    async def is_all_taken() -> bool:
        return sum(map(len, taken.values())) == 64

    async def both_wait() -> bool:
        waiting = await raw(bus).client_list()
        blocked = [client for client in waiting if "b" in client["flags"] and client["cmd"].startswith("xreadgroup")]
        return len(blocked) == 2

    async with (
        running(make(bus, take("a"), "a", concurrency=64, unit=8)),
        running(make(bus, take("b"), "b", concurrency=64, unit=8)),
    ):
        await until(both_wait)
        async with raw(bus).pipeline(transaction=True) as together:
            for number in range(64):
                data = wire.encode(builders.prompt(number))
                together.xadd(bus.keys.of(PROMPTS), {"id": str(number), "data": data})
            await together.execute()
        await until(is_all_taken)
        let_go.set()
    assert all(len(of_one) >= 16 for of_one in taken.values())
    owners = {number: name for name, of_one in taken.items() for number in of_one}
    assert all(len({owners[first + place] for place in range(8)}) == 1 for first in range(0, 64, 8))


@pytest.mark.parametrize(("concurrency", "unit", "few"), [(3, 0, 1), (9, 0, 3), (16, 1, 4), (16, 4, 8), (18, 9, 9)])
async def test_what_an_earlier_process_left_is_done_few_at_a_time(
    bus: Bus, concurrency: int, unit: int, few: int
) -> None:
    begun, most, now = 0, 0, 0
    enough = asyncio.Event()

    async def count(prompt: Prompt) -> RolloutGroup:
        nonlocal begun, most, now
        begun, now = begun + 1, now + 1
        most = max(most, now)
        if begun >= few:
            enough.set()
        await enough.wait()
        await asyncio.sleep(0)
        now -= 1
        return await answer(prompt)

    await put(bus, 20)
    assert len(await bus.read(PROMPTS, Prompt, "a", 20, None)) == 20
    async with running(make(bus, count, concurrency=concurrency, unit=unit)):
        await until(lambda: _is_length(bus, 20))
    assert most == few


async def test_a_suspect_that_is_taken_while_claims_are_renewed_is_kept(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew, may_renew, go, renewals = bus.renew, asyncio.Event(), asyncio.Event(), 0

    async def late(stream: Stream, consumer: str, lease_s: float) -> set[EntryId]:
        nonlocal renewals
        await may_renew.wait()
        renewals += 1
        return await renew(stream, consumer, lease_s)

    async def wait(prompt: Prompt) -> RolloutGroup:
        await go.wait()
        return await answer(prompt)

    monkeypatch.setattr(bus, "renew", late)
    await put(bus, 6)
    assert len(await bus.read(PROMPTS, Prompt, "a", 4, None)) == 4
    assert len(await bus.read(PROMPTS, Prompt, "dead", 2, None)) == 2
    worker = make(bus, wait, patience=QUICK, concurrency=4)
    async with running(worker):
        await until(lambda: worker.held == 2)
        may_renew.set()
        await until(lambda: renewals >= 6)  # twice as many as fit before a reclaim
        go.set()
        await until(lambda: _is_length(bus, 6))
    assert worker.counts.reclaimed == 2


async def test_what_a_lost_answer_brought_is_given_to_others_while_the_worker_lives(bus: Bus) -> None:
    go = asyncio.Event()

    async def wait(prompt: Prompt) -> RolloutGroup:
        await go.wait()
        return await answer(prompt)

    await put(bus, 2)
    worker = make(bus, wait, patience=QUICK, concurrency=1)
    async with running(worker):
        await until(lambda: worker.held == 1)
        (lost,) = await bus.read(PROMPTS, Prompt, "a", 1, None)  # its connection breaks before the answer arrives
        taken = list[Delivery[Prompt]]()
        while not taken:
            taken = await bus.reclaim(PROMPTS, Prompt, "other", 3600.0, 1)
            await asyncio.sleep(0.02)
        assert [(each.entry_id, each.attempts, each.crashes) for each in taken] == [(lost.entry_id, 1, 0)]
        assert await bus.hand_over(taken[0], ROLLOUTS, await answer(taken[0].message()))
        go.set()
        await until(lambda: _is_length(bus, 2))


async def test_a_replica_takes_no_more_from_a_dead_one_than_it_may_begin_so_that_others_begin_the_rest(
    bus: Bus,
) -> None:
    go = asyncio.Event()

    async def wait(prompt: Prompt) -> RolloutGroup:
        await go.wait()
        return await answer(prompt)

    await put(bus, 8)
    assert len(await bus.read(PROMPTS, Prompt, "dead", 8, None)) == 8
    await bus.leave_suspects(PROMPTS, "dead")
    first, second = (make(bus, wait, name, concurrency=4) for name in ("a", "b"))
    async with running(first):
        await until(lambda: first.counts.reclaimed == 2 and first.held == 2)
        async with running(second):
            await until(lambda: second.counts.reclaimed == 2 and second.held == 2)
            assert (first.counts.reclaimed, first.held) == (2, 2)
            go.set()
            await until(lambda: _is_length(bus, 8))
    assert first.counts.handed_over + second.counts.handed_over == 8


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
    ((_, dead),) = await raw(bus).xrange(bus.keys.of(PROMPTS.dead))
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
        await until(lambda: tries > 3)  # more than max_attempts
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
    ((_, dead),) = await raw(bus).xrange(bus.keys.of(PROMPTS.dead))
    assert (dead[b"reason"], dead[b"attempts"]) == (b"expected an answer, found none", b"1")


async def test_noise_on_the_stream_is_buried_and_the_next_entry_is_handled(bus: Bus) -> None:
    await bus.append(PROMPTS, {"id": "9", "data": b"noise"})
    await put(bus, 1)
    async with running(make(bus, answer)):
        await until(lambda: _is_length(bus, 1))
    assert await bus.length(PROMPTS.dead) == 1


async def test_a_bug_costs_its_group_alone_which_is_buried_with_its_cause(bus: Bus) -> None:
    bugs: list[tuple[str, str]] = []

    async def note(group: str, error: str) -> None:
        bugs.append((group, error))

    async def crash(prompt: Prompt) -> RolloutGroup:
        if prompt.group_id == 1:
            raise ZeroDivisionError("division by zero")
        return await answer(prompt)

    await put(bus, 4)
    worker = Worker(bus, "a", PROMPTS, Prompt, ROLLOUTS, crash, 2, PATIENT, bug=note)
    async with running(worker):
        await until(lambda: worker.counts.buried == 1)
        await until(lambda: _is_length(bus, 3))
    assert await outputs(bus) == ["0", "2", "3"]
    assert bugs == [("1", "ZeroDivisionError: division by zero")] * 3
    assert await _dead(bus) == [(b"1", b"ZeroDivisionError: division by zero", b"3")]
    assert await raw(bus).hgetall(bus.keys.named("causes")) == {}


async def test_a_result_that_cannot_be_written_costs_its_group_alone(bus: Bus) -> None:
    async def odd(prompt: Prompt) -> RolloutGroup:
        return dataclasses.replace(builders.group(prompt.group_id), replica=object())  # type: ignore[arg-type]

    await put(bus, 1)
    worker = make(bus, odd)
    async with running(worker):
        await until(lambda: worker.counts.buried == 1)
    assert await _dead(bus) == [(b"0", b"TypeError: cannot write object into a message", b"3")]


async def test_a_result_longer_than_the_server_takes_costs_its_group_alone(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def long(prompt: Prompt) -> RolloutGroup:
        return builders.group(prompt.group_id, ("46" * (prompt.group_id == 1) * 1024**2, "47"))

    monkeypatch.setattr(bus_server, "_LONGEST_VALUE", 1024**2)
    await put(bus, 3)
    worker = make(bus, long)
    async with running(worker):
        await until(lambda: _is_length(bus, 2))
        await until(lambda: worker.counts.buried == 1)
    assert await _dead(bus) == [
        (
            b"1",
            b"expected messages of at most 1 MiB, the longest value of Redis, found 2 MiB: lower sampling.group_size, "
            b"sampling.max_new_tokens or sampling.top_k",
            b"1",
        )
    ]


async def _dead(bus: Bus) -> list[tuple[bytes, bytes, bytes]]:
    rows = await raw(bus).xrange(bus.keys.of(PROMPTS.dead))
    return [(fields[b"id"], fields[b"reason"], fields[b"attempts"]) for _, fields in rows]


@pytest.mark.parametrize("error", [MemoryError(), StateLost("the engine died")])
async def test_what_a_process_cannot_survive_ends_it_and_blames_only_who_was_alone(bus: Bus, error: Exception) -> None:
    async def crash(prompt: Prompt) -> RolloutGroup:
        if prompt.group_id == 1:
            raise error
        await asyncio.sleep(0.01)
        return await answer(prompt)

    await put(bus, 3)
    ends = 0
    for _ in range(2 + PATIENT.max_attempts):
        with pytest.raises(type(error)):
            await make(bus, crash, concurrency=3).run(asyncio.Event())
        ends += 1
    worker = make(bus, crash, concurrency=3)
    async with running(worker):
        await until(lambda: worker.counts.buried == 1)
        await until(lambda: _is_length(bus, 2))
    assert ends == 5, "in a crowd, beside others, and three times alone"
    assert await _dead(bus) == [(b"1", f"failed 3 times: {error!r}".encode(), b"4")]
    assert await raw(bus).hgetall(bus.keys.named("crashes")) == {}


@pytest.mark.parametrize("same_name", [True, False], ids=["started again", "taken over by others"])
async def test_a_poison_group_that_kills_its_process_takes_no_honest_one_with_it(
    bus: Bus, server: Server, *, same_name: bool
) -> None:
    await put(bus, 41)
    deaths = 0
    while not await _outlives(bus, server, "a" if same_name else f"replica-{deaths}"):
        deaths += 1
        if not same_name:
            await _set_idle(bus, 2 * PATIENCE_S)
    assert deaths == 4, "in a crowd, beside others, and twice alone"
    assert await outputs(bus) == sorted(str(group) for group in range(41) if group != 13)
    assert await _dead(bus) == [(b"13", b"failed 2 times: its process died each time without a message", b"3")]
    assert await bus.length(PROMPTS) == 0


async def _outlives(bus: Bus, server: Server, name: str) -> bool:
    """Whether a process that dies of group 13 finishes the other 40."""
    command = [sys.executable, "-m", "tests.support.poisoned_worker", server.url, bus.run_id, name, "13"]
    process = subprocess.Popen(command)
    try:
        await until(lambda: _is_over(bus, process, 40), timeout_s=PATIENCE_S)
        if process.poll() is None:
            return True
        assert process.wait() == -signal.SIGKILL
        return False
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(PATIENCE_S)


async def _is_over(bus: Bus, process: subprocess.Popen[bytes], results: int) -> bool:
    ended = await bus.length(ROLLOUTS) == results and await bus.length(PROMPTS.dead) == 1
    return ended or process.poll() is not None


async def _set_idle(bus: Bus, seconds: float) -> None:
    """Let pending entries be as if not renewed for ``seconds``."""
    for row in await _pending(bus):
        held = (bus.keys.of(PROMPTS), PROMPTS.group, row["consumer"], 0, [row["message_id"]])
        await raw(bus).xclaim(*held, idle=int(1000 * seconds), justid=True)


async def _pending(bus: Bus) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = await raw(bus).xpending_range(bus.keys.of(PROMPTS), PROMPTS.group, "-", "+", 100)
    return rows


@pytest.mark.parametrize("is_leaving", [False, True])
async def test_a_long_handler_and_a_long_hand_over_keep_their_entry(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, is_leaving: bool
) -> None:
    go_on, hand_over, begun = asyncio.Event(), bus.hand_over, asyncio.Event()

    async def slow(prompt: Prompt) -> RolloutGroup:
        if not is_leaving:
            await go_on.wait()
        return await answer(prompt)

    async def late(*given: Any) -> bool:
        begun.set()
        await go_on.wait()  # for the copies of a payload
        return await hand_over(*given)

    monkeypatch.setattr(bus, "hand_over", late)
    await put(bus, 1)
    slow_worker = make(bus, slow, "slow", QUICK, concurrency=1)  # with room for another it would reclaim its own
    leases = bus.keys.named("leases:prompts")
    async with running(slow_worker):
        await until(lambda: slow_worker.held == 1 and begun.is_set() == is_leaving)
        for _ in range(3):
            await raw(bus).zrem(leases, "slow")
            await until(lambda: raw(bus).zscore(leases, "slow"))
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
