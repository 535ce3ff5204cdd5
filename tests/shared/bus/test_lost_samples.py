"""Laws of lost samples: a sample costs itself, unless too few of its group are left."""

import asyncio
import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.shared.bus.assembly import part_of_group
from penstock.shared.bus.bus import Bus, Delivery
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, PolicyVersion, Prompt, RolloutGroup
from penstock.shared.bus.streams import AUDIT, EXPERIENCE, PROMPTS, ROLLOUTS
from penstock.shared.bus.worker import Patience, Worker
from penstock.shared.errors import TemporaryError
from tests.conftest import PATIENCE_S, Server, until
from tests.shared.bus.test_assembly import admit, endings, finish, parts_left, take, together, whole_groups
from tests.support import builders
from tests.support.raw_redis import raw

CAUSE = "the sandbox is gone"


async def lose(bus: Bus, entry: Delivery[Prompt]) -> bool | None:
    return await bus.lose(entry, ROLLOUTS, CAUSE)


@pytest.mark.parametrize("lost_at_the_end", [False, True])
@pytest.mark.parametrize(
    ("samples", "lost", "continues"),
    [
        (8, 0, True), (8, 1, True), (8, 4, True), (8, 5, False), (7, 3, True), (7, 4, False), (5, 2, True), (5, 3, False),
        (3, 1, True), (3, 2, False), (2, 0, True), (2, 1, False), (1, 1, False),
    ],
)  # fmt: skip
async def test_a_group_is_made_without_lost_samples_if_half_of_it_and_two_are_left_and_is_buried_otherwise(
    bus: Bus, samples: int, lost: int, continues: bool, lost_at_the_end: bool
) -> None:
    ledger = await admit(bus, builders.prompt(0, samples=samples))
    entries = await take(bus)
    first, rest = entries[:lost], entries[lost:]
    if lost_at_the_end:
        assert all([await finish(bus, entry, entry.part) for entry in rest])
    answers = [await lose(bus, entry) for entry in first]
    given_up = lost if continues else lost - 1
    assert answers == [True] * given_up + [None] * (not continues)
    assert (await bus.counts()).get("lost_samples", 0) == given_up
    if not continues:
        assert await bus.length(PROMPTS) == (1 if lost_at_the_end else samples - given_up), "a refusal changes nothing"
        assert await bus.bury(first[-1], CAUSE)
    if not lost_at_the_end:
        assert [await finish(bus, entry, entry.part) for entry in rest] == [continues] * len(rest)
    made = [[sample.text for sample in group.samples] for group in await whole_groups(bus)]
    assert made == ([[entry.part for entry in rest]] if continues else [])
    assert await endings(bus) == [("0", "lost_sample")] * given_up + [("0", "dead:prompts")] * (not continues)
    assert (await bus.length(PROMPTS), await parts_left(bus), await ledger.in_flight()) == (0, 0, int(continues))


async def test_a_lost_sample_leaves_with_its_cause_and_is_neither_reclaimed_nor_finished_nor_lost_again(
    bus: Bus,
) -> None:
    await admit(bus, builders.prompt(0, samples=4))
    slow = await take(bus)
    quick = await bus.reclaim(PROMPTS, Prompt, "quick", 0.0, 4)
    await bus.note_cause(await bus.note_crash(slow[1]), CAUSE)
    assert await lose(bus, slow[1])
    assert [await raw(bus).exists(bus.keys.named(name)) for name in ("crashes", "causes")] == [0, 0]
    ((_, fields),) = await raw(bus).xrange(bus.keys.of(AUDIT))
    assert (fields[b"id"], fields[b"outcome"], fields[b"detail"]) == (
        b"0",
        b"lost_sample",
        f"sample 1: {CAUSE}".encode(),
    )
    assert await lose(bus, quick[1]) is False, "of the reply that was lost, or of another consumer"
    assert not await finish(bus, quick[1], "late")
    assert not await bus.bury(quick[1], "late")
    assert await bus.give_back(PROMPTS, "quick", quick[1].entry_id, idle_s=PATIENCE_S) == 0
    assert [entry.part for entry in await bus.reclaim(PROMPTS, Prompt, "c", 0.0, 4)] == ["0", "2", "3"]
    made = builders.group(0, ("0", "1", "2", "3"))
    assert await bus.hand_over_part(quick, ROLLOUTS, together(made, 0, 1, 2, 3)) == 3
    assert await lose(bus, quick[1]) is False, "its group is whole"
    assert await lose(bus, quick[0]) is False
    (group,) = await whole_groups(bus)
    assert [sample.text for sample in group.samples] == ["0", "2", "3"]
    assert await bus.counts() == {"lost_samples": 1}


async def test_a_requeued_group_that_lost_samples_is_generated_whole_and_may_lose_as_many_again(bus: Bus) -> None:
    await admit(bus, builders.prompt(0, samples=4))
    for _ in range(2):
        entries = await take(bus)
        assert [entry.part for entry in entries] == ["0", "1", "2", "3"]
        assert [await lose(bus, entry) for entry in entries[:3]] == [True, True, None]
        assert all([await finish(bus, entry) for entry in entries[2:]])
        (group,) = await bus.read(ROLLOUTS, RolloutGroup, "b", 1, None)
        assert len(group.message().samples) == 2
        await bus.hand_over(group, EXPERIENCE, builders.experience(0))
        (stale,) = await bus.read(EXPERIENCE, Experience, "trainer", 1, None)
        assert await bus.requeue(stale, builders.prompt(0, samples=4))
    assert await bus.counts() == {"lost_samples": 4, "requeued": 2}


@pytest.mark.parametrize(("kept", "samples", "is_group"), [
    ((1, 2), 4, True), ((0, 3, 1), 4, True), ((3,), 4, False), ((0, 1), 5, False), ((1, 1), 4, False), ((0, 4), 4, False),
])  # fmt: skip
def test_parts_that_came_are_a_group_in_order_if_they_are_half_of_it(
    kept: tuple[int, ...], samples: int, is_group: bool
) -> None:
    whole = builders.group(7, tuple("01234"))
    prompt = dataclasses.replace(whole.prompt, sampling=dataclasses.replace(whole.prompt.sampling, samples=samples))
    pieces = [wire.encode(prompt), *(part_of_group(whole, place) for place in kept)]
    data = b"\xdd" + len(pieces).to_bytes(4, "big") + b"".join(b"\xc6" + len(p).to_bytes(4, "big") + p for p in pieces)
    if is_group:
        assert [sample.text for sample in wire.decode(data, RolloutGroup).samples] == sorted(map(str, kept))
    else:
        with pytest.raises(Exception, match=f"expected at least half of the {samples} samples"):
            wire.decode(data, RolloutGroup)


KILLED = """
import asyncio, os, signal, sys
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Prompt
from penstock.shared.bus.streams import PROMPTS, ROLLOUTS

async def main():
    bus = await Bus.connect(sys.argv[1], sys.argv[2], wait_s=180)
    entries = await bus.read(PROMPTS, Prompt, "killed", 4, block_s=5)
    for entry in entries[: int(sys.argv[3])]:
        await bus.lose(entry, ROLLOUTS, "gone")
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize(("given_up", "left"), [(1, ["1", "2", "3"]), (3, ["2", "3"])])
async def test_a_process_killed_after_it_gave_up_samples_leaves_the_others_to_be_finished(
    bus: Bus, server: Server, given_up: int, left: list[str]
) -> None:
    await admit(bus, builders.prompt(0, samples=4))
    command = [sys.executable, "-c", KILLED, server.url, bus.run_id, str(given_up)]
    ended = await asyncio.to_thread(subprocess.run, command, cwd=Path(__file__).parents[3], timeout=PATIENCE_S)
    assert ended.returncode == -signal.SIGKILL
    again = await bus.reclaim(PROMPTS, Prompt, "b", 0.0, 4)
    assert [entry.part for entry in again] == left, "the third was refused: it would leave one"
    assert all([await finish(bus, entry, entry.part) for entry in again])
    (group,) = await whole_groups(bus)
    assert [sample.text for sample in group.samples] == left
    assert (await bus.counts(), await parts_left(bus)) == ({"lost_samples": 4 - len(left)}, 0)


async def test_of_groups_that_lose_a_twentieth_of_their_samples_no_more_is_wasted(bus: Bus) -> None:
    """Each after five attempts. Were its group buried with it, 35 % would be."""
    groups, samples, tried, told = 40, 8, list[tuple[int, int | None]](), list[tuple[str, str]]()
    drawn = np.random.default_rng(0).choice(groups * samples, groups * samples // 20, replace=False)
    lost = {divmod(int(place), samples) for place in drawn}
    assert len({group for group, _ in lost}) == 14, "35 % of the groups"

    async def generate(prompt: Prompt) -> RolloutGroup:
        tried.append((prompt.group_id, prompt.sample))
        if (prompt.group_id, prompt.sample) in lost:
            raise TemporaryError(CAUSE)
        return builders.part(prompt)

    async def tell(group: str, error: str) -> None:
        told.append((group, error))

    first, *others = (builders.prompt(group, samples=samples) for group in range(groups))
    ledger = await admit(bus, first)
    assert await ledger.admit(others, groups, groups, 10, PolicyVersion(0)) == groups - 1
    stop, patience = asyncio.Event(), Patience(claim_after_s=PATIENCE_S, retry_s=0.001)
    worker = Worker(bus, "a", PROMPTS, Prompt, ROLLOUTS, generate, 64, patience, bug=tell)
    working = asyncio.create_task(worker.run(stop))
    await until(lambda: _are_whole(bus, groups))
    stop.set()
    await working
    made = [delivery.message() for delivery in await bus.read(ROLLOUTS, RolloutGroup, "b", groups, None)]
    tokens = sum(len(sample.token_ids) for group in made for sample in group.samples)
    asked = groups * samples * len(builders.sample("46").token_ids)
    assert 1 - tokens / asked <= 0.06
    assert tokens == asked * 19 // 20, "every other sample is in a group"
    assert all(tried.count(place) == 5 for place in lost)
    assert sorted(told) == sorted((str(group), f"sample {sample} is lost: {CAUSE}") for group, sample in lost)
    assert (worker.counts.lost, worker.counts.buried, await bus.counts()) == (16, 0, {"lost_samples": 16})
    assert await ledger.in_flight() == groups


async def _are_whole(bus: Bus, groups: int) -> bool:
    return await bus.length(ROLLOUTS) == groups
