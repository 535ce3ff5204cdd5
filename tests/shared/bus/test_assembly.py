"""Laws of the samples of a group: entries of their own, one group."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgpack
import numpy as np
import pytest

from penstock.shared.bus.assembly import bare, part_of_group, split
from penstock.shared.bus.bus import Bus, Delivery, EntryId
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, PolicyRecord, PolicyVersion, Prompt, RolloutGroup
from penstock.shared.bus.stores.experience.dead_letters import DeadLetterSource, discard, read_page, revive
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.streams import AUDIT, EXPERIENCE, PROMPTS, PUBLISHED, ROLLOUTS, Stream
from penstock.shared.bus.worker import HandOver, Patience, Worker
from penstock.shared.errors import MessageError, NotHere, StateLost, TemporaryError
from tests.chaos.fuzz import Hostile
from tests.conftest import PATIENCE_S, until
from tests.support import builders
from tests.support.coordinator_players import Trainer, generating, record, report
from tests.support.raw_redis import raw


async def admit(bus: Bus, *groups: Prompt, whole: bool = False) -> Ledger:
    ledger = Ledger(bus)
    await ledger.create()
    await Trainer(bus).start()
    (published,) = await bus.read(PUBLISHED, PolicyRecord, "coordinator", 1, 1.0)
    assert await ledger.promote(published)
    await ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    assert await ledger.admit(groups, 8, 2, 10, PolicyVersion(0), whole=whole) == len(groups)
    return ledger


async def take(bus: Bus, count: int = 100) -> list[Delivery[Prompt]]:
    return await bus.read(PROMPTS, Prompt, "a", count, 0.5)


async def finish(bus: Bus, delivery: Delivery[Prompt], text: str = "46") -> bool:
    return await bus.hand_over(delivery, ROLLOUTS, builders.part(delivery.message(), text=text))


def together(whole: RolloutGroup, *places: int) -> RolloutGroup:
    """Return the samples of a group that ended together."""
    samples = tuple(whole.samples[place] for place in places)
    return dataclasses.replace(whole, prompt=bare(whole.prompt), samples=samples, places=places)


async def whole_groups(bus: Bus) -> list[RolloutGroup]:
    return [delivery.message() for delivery in await bus.read(ROLLOUTS, RolloutGroup, "b", 10, None)]


async def parts_left(bus: Bus) -> int:
    return len([key async for key in raw(bus).scan_iter(f"{bus.keys.named('assembly')}:*")])


async def endings(bus: Bus) -> list[tuple[str, str]]:
    rows = await raw(bus).xrange(bus.keys.of(AUDIT))
    return [(fields[b"id"].decode(), fields[b"outcome"].decode()) for _, fields in rows]


async def test_each_sample_is_an_entry_and_the_last_to_end_makes_the_group(bus: Bus) -> None:
    first, second = builders.prompt(0, samples=3), builders.prompt(1, text="1+1=", samples=3)
    ledger = await admit(bus, first, second)
    entries = await take(bus)
    assert [(entry.message().group_id, entry.message().sample) for entry in entries] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)
    ]  # fmt: skip
    assert entries[3].message().text == "1+1="
    for place in (2, 0, 4):
        assert await finish(bus, entries[place], f"text {place}")
    assert await whole_groups(bus) == []
    assert await ledger.in_flight() == 2
    assert await finish(bus, entries[1], "text 1")
    (group,) = await whole_groups(bus)
    assert [sample.text for sample in group.samples] == ["text 0", "text 1", "text 2"]
    assert group.prompt == first
    assert await ledger.in_flight() == 2
    for entry in (entries[5], entries[3]):
        assert await finish(bus, entry)
    assert [made.prompt for made in await whole_groups(bus)] == [second]
    assert (await bus.length(PROMPTS), await parts_left(bus), await generating(bus)) == (0, 0, [])


async def test_a_sample_that_two_consumers_finish_counts_once(bus: Bus) -> None:
    await admit(bus, builders.prompt(0, samples=2))
    slow, other = await take(bus)
    (quick, _) = await bus.reclaim(PROMPTS, Prompt, "quick", 0.0, 2)
    assert await finish(bus, quick, "quick")
    assert not await finish(bus, slow, "slow")
    assert await whole_groups(bus) == []
    assert await finish(bus, other)
    (group,) = await whole_groups(bus)
    assert [sample.text for sample in group.samples] == ["quick", "46"]


async def test_samples_that_ended_together_travel_together_and_make_the_group_with_the_others(bus: Bus) -> None:
    ledger = await admit(bus, builders.prompt(0, samples=5))
    entries = await take(bus)
    made = builders.group(0, ("0", "1", "2", "3", "4"))
    for entry in entries:
        await bus.note_cause(await bus.note_crash(entry), "out of memory")
    assert await bus.hand_over_part([entries[4], entries[1]], ROLLOUTS, together(made, 4, 1)) == 2
    assert await bus.hand_over(entries[3], ROLLOUTS, part_of_group(made, 3))
    assert (await whole_groups(bus), await ledger.in_flight(), await bus.length(PROMPTS)) == ([], 1, 2)
    assert await bus.hand_over_part([entries[0], entries[2]], ROLLOUTS, together(made, 0, 2)) == 2
    (group,) = await whole_groups(bus)
    assert wire.encode(group) == wire.encode(made)
    assert (await ledger.in_flight(), await bus.length(PROMPTS), await parts_left(bus)) == (1, 0, 0)
    assert [await raw(bus).exists(bus.keys.named(name)) for name in ("crashes", "causes")] == [0, 0]


async def test_of_samples_handed_over_together_one_that_another_finished_counts_once(bus: Bus) -> None:
    await admit(bus, builders.prompt(0, samples=3))
    slow = await take(bus)
    (quick,) = await bus.reclaim(PROMPTS, Prompt, "quick", 0.0, 1)
    assert await finish(bus, quick, "quick")
    made = builders.group(0, ("slow", "1", "2"))
    assert await bus.hand_over_part(slow, ROLLOUTS, together(made, 0, 1, 2)) == 2
    assert await bus.hand_over_part(slow, ROLLOUTS, together(made, 0, 1, 2)) == 0
    (group,) = await whole_groups(bus)
    assert [sample.text for sample in group.samples] == ["quick", "1", "2"]
    assert (await bus.length(PROMPTS), await parts_left(bus)) == (0, 0)


async def test_samples_of_a_group_that_has_ended_are_late_together(bus: Bus) -> None:
    ledger = await admit(bus, builders.prompt(0, samples=3))
    entries = await take(bus)
    assert await bus.bury(entries[0], "too strange")
    assert await bus.hand_over_part(entries[1:], ROLLOUTS, together(builders.group(0, ("0", "1", "2")), 1, 2)) == 0
    assert (await whole_groups(bus), await ledger.in_flight(), await parts_left(bus)) == ([], 0, 0)
    assert await bus.counts() == {"dead:prompts": 1}


async def test_a_group_that_is_not_split_is_one_entry(bus: Bus) -> None:
    ledger = await admit(bus, builders.prompt(0, samples=3), whole=True)
    (entry,) = await take(bus)
    assert entry.message() == builders.prompt(0, samples=3)
    assert await bus.hand_over(entry, ROLLOUTS, builders.group(0, ("1", "2", "3")))
    (group,) = await whole_groups(bus)
    assert [sample.text for sample in group.samples] == ["1", "2", "3"]
    assert (await ledger.in_flight(), await parts_left(bus)) == (1, 0)


async def test_a_buried_sample_ends_its_group_once_and_takes_its_other_samples_along(bus: Bus) -> None:
    ledger = await admit(bus, builders.prompt(0, samples=3), builders.prompt(1, samples=3))
    done, buried, held, *_ = await take(bus)
    assert await finish(bus, done)
    assert await bus.bury(buried, "too strange")
    assert not await finish(bus, held), "its group has ended"
    assert not await bus.bury(held, "again")
    assert not await bus.drop(held, "run_ended")
    assert await bus.counts() == {"dead:prompts": 1}
    assert await endings(bus) == [("0", "dead:prompts")]
    assert (await bus.length(PROMPTS), await ledger.in_flight(), await parts_left(bus)) == (3, 1, 1)
    (letter,) = await read_page(bus, "", 10, None)
    assert letter.reason == "sample 1: too strange"
    assert wire.decode(letter.data, Prompt) == builders.prompt(0, samples=3)


async def test_a_revived_sample_revives_its_group_from_its_prompt(bus: Bus) -> None:
    ledger = await admit(bus, builders.prompt(0, samples=3))
    done, buried, late = await take(bus)
    await finish(bus, done)
    await bus.bury(buried, "too strange")
    (letter,) = await read_page(bus, "", 10, None)
    assert await revive(bus, DeadLetterSource.PROMPTS, letter.entry) == 1
    assert await revive(bus, DeadLetterSource.PROMPTS, letter.entry) == 0
    assert (await bus.counts(), await ledger.in_flight()) == ({"dead:prompts": 0}, 1)
    assert not await finish(bus, late), "an entry of its first life"
    for entry in await take(bus):
        assert entry.attempts == 1
        assert await finish(bus, entry, "second life")
    (group,) = await whole_groups(bus)
    assert [sample.text for sample in group.samples] == ["second life"] * 3
    assert await parts_left(bus) == 0


async def test_a_discarded_sample_discards_its_group(bus: Bus) -> None:
    ledger = await admit(bus, builders.prompt(0, samples=3))
    await bus.bury((await take(bus))[1], "too strange")
    (letter,) = await read_page(bus, "", 10, None)
    assert await discard(bus, DeadLetterSource.PROMPTS, letter.entry, "")
    assert await bus.counts() == {"dead:prompts": 0, "dropped:discarded": 1}
    assert await ledger.in_flight() == 0


async def test_only_the_sample_that_failed_is_tried_again(bus: Bus) -> None:
    await admit(bus, builders.prompt(0, samples=4), builders.prompt(1, samples=4))
    tried: list[tuple[int, int | None]] = []

    async def generate(prompt: Prompt) -> RolloutGroup:
        tried.append((prompt.group_id, prompt.sample))
        if tried.count((1, 2)) == 1 and (prompt.group_id, prompt.sample) == (1, 2):
            raise TemporaryError("a bad moment")
        return builders.part(prompt)

    stop, patience = asyncio.Event(), Patience(claim_after_s=PATIENCE_S, retry_s=0.01)
    working = asyncio.create_task(Worker(bus, "a", PROMPTS, Prompt, ROLLOUTS, generate, 8, patience).run(stop))
    await until(lambda: _whole(bus, 2))
    stop.set()
    await working
    assert sorted(tried) == sorted([(group, sample) for group in (0, 1) for sample in range(4)] + [(1, 2)])


async def _whole(bus: Bus, count: int) -> bool:
    return await bus.length(ROLLOUTS) == count


class Generating:
    """A worker whose samples end together as told, each of the others alone."""

    def __init__(self, bus: Bus, *, claim_after_s: float = PATIENCE_S, concurrency: int = 8) -> None:
        self.asked: list[tuple[int, list[int]]] = []
        self.alone: list[tuple[int, int | None]] = []
        self.error: Exception | None = None
        self.first, self.rest = asyncio.Event(), asyncio.Event()
        self.cancelled = 0
        self.worker = Worker(
            bus, "a", PROMPTS, Prompt, ROLLOUTS, self._handle, concurrency, Patience(claim_after_s, retry_s=0.01),
            together=self._handle_together,
        )  # fmt: skip

    async def _handle(self, prompt: Prompt) -> RolloutGroup:
        self.alone.append((prompt.group_id, prompt.sample))
        return builders.part(prompt)

    async def _handle_together(self, prompt: Prompt, places: Sequence[int], hand_over: HandOver) -> None:
        self.asked.append((prompt.group_id, list(places)))
        made = builders.group(prompt.group_id, ("46",) * prompt.sampling.samples)
        try:
            await self.first.wait()
            await hand_over(together(made, *places[:2]))
            await self.rest.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        if places[2:]:
            await hand_over(together(made, *places[2:]))

    def go_on(self) -> None:
        """Let samples end as they come."""
        self.first.set()
        self.rest.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        working = asyncio.create_task(self.worker.run(stop))
        try:
            yield
        finally:
            stop.set()
            await working


async def test_new_samples_of_a_group_are_handled_together_and_make_room_as_they_end(bus: Bus) -> None:
    await admit(bus, *(builders.prompt(group, samples=4) for group in range(2)))
    generating = Generating(bus, concurrency=4)
    async with generating.running():
        await until(lambda: len(generating.asked) == 1)  # its entries are held before its task begins
        assert (generating.asked, generating.worker.held) == ([(0, [0, 1, 2, 3])], 4)
        generating.first.set()
        await until(lambda: _whole(bus, 1))
        assert [group.group_id for group in await whole_groups(bus)] == [1], "in the room of what ended"
        generating.rest.set()
        await until(lambda: _whole(bus, 2))
    assert (generating.asked[1:], generating.alone) == ([(1, [0, 1]), (1, [2, 3])], [])
    assert (generating.worker.counts.handed_over, generating.worker.held) == (8, 0)


async def test_of_samples_handled_together_those_that_fail_are_handled_alone_which_counts_no_attempt(bus: Bus) -> None:
    await admit(bus, builders.prompt(0, samples=4))
    generating = Generating(bus)
    generating.error = TemporaryError("a bad moment")
    generating.go_on()
    async with generating.running():
        await until(lambda: _whole(bus, 1))
    assert (generating.asked, sorted(generating.alone)) == ([(0, [0, 1, 2, 3])], [(0, 2), (0, 3)])
    assert (generating.worker.counts.handed_over, generating.worker.counts.retried) == (4, 0)


async def test_samples_that_cannot_be_handled_here_are_given_back_and_later_handled_together_again(bus: Bus) -> None:
    await admit(bus, builders.prompt(0, samples=4))
    generating = Generating(bus)
    generating.error = NotHere("an older version is kept for an evaluation")
    generating.go_on()
    async with generating.running():
        await until(lambda: generating.worker.counts.given_back == 2)
        generating.error = None
        await until(lambda: _whole(bus, 1))
    assert generating.alone == []
    assert generating.worker.counts.retried == 0


async def test_a_sample_that_is_taken_again_while_others_are_still_given_back_is_not_lost(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await admit(bus, builders.prompt(0, samples=4))
    generating, give_back, given = Generating(bus), bus.give_back, list[EntryId]()

    async def slow(source: Stream, consumer: str, entry: EntryId, *, idle_s: float, uncounted: int) -> None:
        given.append(entry)
        if len(given) == 2:
            generating.error = None
            await until(lambda: generating.worker.counts.handed_over == 3)  # the first of two, taken again
        await give_back(source, consumer, entry, idle_s=idle_s, uncounted=uncounted)

    monkeypatch.setattr(bus, "give_back", slow)
    generating.error = NotHere("an older version is kept for an evaluation")
    generating.go_on()
    async with generating.running():
        await until(lambda: _whole(bus, 1))
    assert len(given) == 2


async def test_a_sample_that_was_tried_before_is_handled_alone(bus: Bus) -> None:
    await admit(bus, builders.prompt(0, samples=4))
    for entry in (await take(bus, 2))[::-1]:
        await bus.give_back(PROMPTS, "a", entry.entry_id, idle_s=PATIENCE_S)
    generating = Generating(bus)
    generating.first.set()
    async with generating.running():
        await until(lambda: _whole(bus, 1))
        generating.rest.set()
    assert (generating.asked, sorted(generating.alone)) == ([(0, [2, 3])], [(0, 0), (0, 1)])


@pytest.mark.parametrize("taken", [1, 3])
async def test_samples_handled_together_are_given_up_when_all_were_taken_over(
    bus: Bus, caplog: pytest.LogCaptureFixture, taken: int
) -> None:
    await admit(bus, builders.prompt(0, samples=3))
    generating = Generating(bus, claim_after_s=6.0)  # noticed in a third of it; a shorter one lets it reclaim from "b"
    async with generating.running():
        await until(lambda: len(generating.asked) == 1)
        for entry in await bus.reclaim(PROMPTS, Prompt, "b", 0.0, taken):
            assert await finish(bus, entry, "other")
        await until(lambda: caplog.text.count("entry was taken over") >= taken)
        await until(lambda: generating.cancelled == 1 or taken < 3)
        generating.first.set()
        generating.rest.set()
        await until(lambda: _whole(bus, 1))
    (group,) = await whole_groups(bus)
    assert [sample.text for sample in group.samples] == ["other"] * taken + ["46"] * (3 - taken)
    assert (generating.cancelled, generating.alone) == (int(taken == 3), [])
    assert generating.worker.counts.late == (1 if taken == 1 else 0)


async def test_what_a_process_cannot_survive_is_noted_of_all_samples_that_it_handled_together(bus: Bus) -> None:
    await admit(bus, builders.prompt(0, samples=4))
    generating = Generating(bus)
    generating.error = StateLost("the engine died")
    generating.go_on()
    with pytest.raises(StateLost, match="the engine died"):
        await generating.worker.run(asyncio.Event())
    left = await bus.reclaim(PROMPTS, Prompt, "b", 0.0, 10, suspects=10)
    assert [(entry.part, entry.attempts, entry.crashes) for entry in left] == [("2", 1, 1), ("3", 1, 1)]
    assert [await bus.cause(entry) for entry in left] == ["StateLost('the engine died')"] * 2


async def held_at_two_deaths(bus: Bus) -> None:
    for entry in 2 * await take(bus):
        await bus.note_crash(entry)


def suspecting(bus: Bus, handler: Callable[[Prompt], Awaitable[RolloutGroup]]) -> Worker[Prompt, RolloutGroup]:
    return Worker(bus, "a", PROMPTS, Prompt, ROLLOUTS, handler, 8, Patience(PATIENCE_S, max_attempts=2))


async def test_samples_of_a_group_that_were_held_at_two_deaths_are_tried_alone_together(bus: Bus) -> None:
    await admit(bus, *(builders.prompt(group, samples=4) for group in (0, 1)))
    await held_at_two_deaths(bus)
    begun: list[int] = []
    all_four = asyncio.Event()

    async def handle(prompt: Prompt) -> RolloutGroup:
        begun.append(int(prompt.group_id))
        if len(begun) == 4:
            all_four.set()
        await all_four.wait()
        return builders.part(prompt)

    stop = asyncio.Event()
    working = asyncio.create_task(suspecting(bus, handle).run(stop))
    await until(lambda: _whole(bus, 2))
    stop.set()
    await working
    assert begun == [0, 0, 0, 0, 1, 1, 1, 1]


async def test_a_sample_that_kills_its_process_ends_its_group_once_and_no_other(bus: Bus) -> None:
    await admit(bus, *(builders.prompt(group, samples=3) for group in (0, 1)))
    await held_at_two_deaths(bus)

    async def handle(prompt: Prompt) -> RolloutGroup:
        if (prompt.group_id, prompt.sample) == (0, 1):
            raise StateLost("the engine died")
        if prompt.group_id == 0:
            await asyncio.Event().wait()
        return builders.part(prompt)

    for _ in range(2):
        with pytest.raises(StateLost, match="the engine died"):
            await suspecting(bus, handle).run(asyncio.Event())
    stop, worker = asyncio.Event(), suspecting(bus, handle)
    working = asyncio.create_task(worker.run(stop))
    await until(lambda: _whole(bus, 1))
    stop.set()
    await working
    assert await endings(bus) == [("0", "lost_sample"), ("0", "dead:prompts")], (
        "its samples, tried together, fail together"
    )
    assert (worker.counts.lost, worker.counts.buried) == (1, 1)
    assert (await bus.length(PROMPTS), await parts_left(bus)) == (0, 0)


async def test_samples_tried_alone_that_are_given_back_are_counted_no_attempt(bus: Bus) -> None:
    await admit(bus, builders.prompt(0, samples=3))
    await held_at_two_deaths(bus)
    waiting: list[int | None] = []

    async def handle(prompt: Prompt) -> RolloutGroup:
        waiting.append(prompt.sample)
        await asyncio.Event().wait()
        return builders.part(prompt)

    worker = suspecting(bus, handle)
    working = asyncio.create_task(worker.run(asyncio.Event()))
    await until(lambda: len(waiting) == 3)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    left = await bus.reclaim(PROMPTS, Prompt, "b", 0.0, 10)
    assert [(entry.part, entry.attempts) for entry in left] == [("0", 1), ("1", 1), ("2", 1)]


@pytest.mark.parametrize("part", ["7", "-1", "x", "²", "1" * 5000, "all"])
async def test_an_entry_that_a_stranger_forged_for_a_group_in_flight_changes_nothing_of_it(bus: Bus, part: str) -> None:
    ledger = await admit(bus, builders.prompt(0, samples=2))
    entries = await take(bus)
    await bus.append(PROMPTS, {"id": "0", "part": part})
    (forged,) = await take(bus)
    assert not await bus.hand_over(forged, ROLLOUTS, builders.part(builders.prompt(0)))
    if part != "all":
        with pytest.raises(MessageError, match="expected a sample of 2, found"):
            forged.message()
    assert (await bus.counts(), await ledger.in_flight()) == ({}, 1)
    for entry in entries:
        assert await finish(bus, entry)
    assert len(await whole_groups(bus)) == 1


async def test_a_forged_entry_that_is_buried_ends_no_group(bus: Bus) -> None:
    ledger = await admit(bus, builders.prompt(0, samples=2))
    await take(bus)
    await bus.append(PROMPTS, {"id": "0", "part": "1"})
    (forged,) = await take(bus)
    assert not await bus.bury(forged, "forged")
    assert (await bus.counts(), await ledger.in_flight(), await bus.length(PROMPTS)) == ({}, 1, 2)


@pytest.mark.parametrize(
    "harm",
    [
        lambda parts: [parts[0], parts[0]],
        lambda parts: [parts[1], parts[1]],
        lambda parts: [dataclasses.replace(parts[0], samples=()), parts[1]],
        lambda parts: [parts[0], dataclasses.replace(parts[1], prompt_token_ids=parts[1].prompt_token_ids[1:])],
    ],
)
def test_pieces_that_are_not_one_group_are_refused(harm: object) -> None:
    prompt = builders.prompt(0)
    parts = [builders.part(dataclasses.replace(prompt, sample=place)) for place in (0, 1)]
    assert len(wire.decode(_joined(prompt, parts), RolloutGroup).samples) == 2
    with pytest.raises(MessageError, match="expected"):
        wire.decode(_joined(prompt, harm(parts)), RolloutGroup)  # type: ignore[operator]


def test_joined_parts_are_the_group_of_their_samples() -> None:
    whole = builders.group(7, ("1", "2", "3"))
    lengths, spans = (3, 1, 5), ([[0, 4]], [[0, 4]], [[0, 4], [2, 6]])
    samples = tuple(
        dataclasses.replace(builders.sample(text, tokens=tokens), version_spans=np.array(of, np.int32))
        for text, tokens, of in zip("123", lengths, spans, strict=True)
    )
    whole = dataclasses.replace(whole, samples=samples)
    pieces = [wire.encode(whole.prompt), *(part_of_group(whole, place) for place in range(3))]
    assert wire.encode(wire.decode(array(*pieces), RolloutGroup)) == wire.encode(whole)


@pytest.mark.parametrize("parts", [[(0, 1, 2, 3)], [(3, 1), (0, 2)], [(2,), (3, 0, 1)], [(1, 0), (2,), (3,)]])
def test_joined_parts_of_several_samples_are_the_group_in_order(parts: list[tuple[int, ...]]) -> None:
    whole = builders.group(7, ("1", "2", "3", "4"))
    samples = tuple(builders.sample(text, tokens=tokens) for text, tokens in zip("1234", (3, 1, 5, 2), strict=True))
    whole = dataclasses.replace(whole, samples=samples)
    pieces = [wire.encode(whole.prompt), *(wire.encode(together(whole, *places)) for places in parts)]
    assert wire.encode(wire.decode(array(*pieces), RolloutGroup)) == wire.encode(whole)
    assert [wire.encode(part) for part in split(together(whole, 3, 1))] == [
        part_of_group(whole, 3), part_of_group(whole, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("places", [(0, 2), (1, 1), (0,), (0, 1, 2), ("0", 1), (True, 0), (-1, 0), (0.0, 1), ([], 1)])
def test_a_part_whose_samples_are_not_those_of_its_places_is_refused(places: tuple[Any, ...]) -> None:
    whole = builders.group(7, ("1", "2", "3"))
    spoiled = wire.encode(dataclasses.replace(together(whole, 0, 1), places=places))
    with pytest.raises(MessageError, match="expected"):
        wire.decode(array(wire.encode(whole.prompt), spoiled, part_of_group(whole, 2)), RolloutGroup)


def test_a_kept_sample_joins_new_ones_without_what_its_teacher_said() -> None:
    whole = builders.group(7, ("1", "2"))
    taught = dataclasses.replace(
        whole.samples[0],
        teacher_logprobs=np.full(3, -1.0, np.float32),
        teacher_top_ids=np.array([[1, 2]] * 3, np.int32),
        teacher_top_logprobs=np.full((3, 2), -1.0, np.float32),
    )
    kept = part_of_group(dataclasses.replace(whole, samples=(taught, whole.samples[1])), 0)
    read = wire.decode(array(wire.encode(whole.prompt), kept, part_of_group(whole, 1)), RolloutGroup)
    assert wire.encode(read) == wire.encode(whole)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("samples", "token_ids", "lengths"), [2]),
        (("samples", "token_ids", "lengths"), [3, 0]),
        (("samples", "token_ids", "joined"), np.arange(3, dtype=np.int64)),
        (("samples", "token_ids", "joined"), np.array([0, 1, -1], np.int32)),
        (("samples", "token_ids"), [[1, 2, 3]]),
        (("samples", "text"), ["46", "47"]),
        (("samples", "text"), "4"),
        (("samples", "rows"), 2),
        (("prompt", "sample"), np.zeros(2)),
        (("prompt_token_ids",), [5, 6, 8]),
        (("replica",), {}),
        (("started_at_s",), "now"),
        (("schema",), 99),
        (("kind",), "prompt"),
    ],
)
def test_a_part_that_is_not_one_whole_sample_spoils_no_other(path: tuple[str, ...], value: object) -> None:
    whole = builders.group(7)
    fields = msgpack.unpackb(part_of_group(whole, 1), ext_hook=wire._read_array)
    inner = fields
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    spoiled = msgpack.packb(fields, default=wire._plain)
    with pytest.raises(MessageError, match="expected"):
        wire.decode(array(wire.encode(whole.prompt), part_of_group(whole, 0), spoiled), RolloutGroup)


def test_no_mutation_of_joined_parts_raises_anything_but_a_message_error() -> None:
    hostile, whole, read = Hostile(seed=7), builders.group(3), 0
    parts = [part_of_group(whole, place) for place in range(2)]
    honest = {b"id": b"3", b"data": parts[1]}
    for _ in range(300):
        data = hostile.entry(honest, [honest]).get(b"data", b"")
        with contextlib.suppress(MessageError):
            read += len(wire.decode(array(wire.encode(whole.prompt), parts[0], data), RolloutGroup).samples) == 2
    assert read < 200


def test_no_mutation_of_a_part_of_several_samples_raises_anything_but_a_message_error() -> None:
    hostile, whole, read = Hostile(seed=8), builders.group(3, ("1", "2", "3")), 0
    honest = {b"id": b"3", b"data": wire.encode(together(whole, 2, 0))}
    for _ in range(300):
        data = hostile.entry(honest, [honest]).get(b"data", b"")
        with contextlib.suppress(MessageError):
            group = wire.decode(array(wire.encode(whole.prompt), data, part_of_group(whole, 1)), RolloutGroup)
            read += len(group.samples) == 3
    assert read < 200


def test_pieces_within_pieces_are_refused_however_deep_they_are() -> None:
    prompt, nested = wire.encode(builders.prompt(0, samples=1)), wire.encode(builders.part(builders.prompt(0)))
    for _ in range(3000):
        nested = array(prompt, nested)
    with pytest.raises(MessageError, match="expected"):
        wire.decode(nested, RolloutGroup)


def array(*pieces: bytes) -> bytes:
    return b"\xdd" + len(pieces).to_bytes(4) + b"".join(b"\xc6" + len(piece).to_bytes(4) + piece for piece in pieces)


def _joined(prompt: Prompt, parts: list[RolloutGroup]) -> bytes:
    return array(wire.encode(prompt), *map(wire.encode, parts))


async def test_what_was_noted_of_an_entry_leaves_with_it_and_with_its_whole_group(bus: Bus) -> None:
    ledger = await admit(bus, *(builders.prompt(group, samples=2) for group in range(4)))

    async def noted(deliveries: list[Delivery[Any]]) -> list[Delivery[Any]]:
        for delivery in deliveries:
            await bus.note_crash(delivery)
            await bus.note_cause(delivery, "out of memory")
        return deliveries

    async def notes() -> list[int]:
        return [len(await raw(bus).hgetall(bus.keys.named(name))) for name in ("crashes", "causes")]

    samples = await noted(await take(bus))
    assert await notes() == [8, 8]
    assert await bus.bury(samples[0], "too strange")
    assert await notes() == [6, 6], "its group's other sample, too"
    for sample in samples[2:]:
        await finish(bus, sample)
    assert await notes() == [0, 0]
    groups = await bus.read(ROLLOUTS, RolloutGroup, "b", 10, None)
    for group in groups:
        await bus.hand_over(group, EXPERIENCE, builders.experience(int(group.group_id)))
    stale, useless, trained = await noted(await bus.read(EXPERIENCE, Experience, "trainer-0", 10, None))
    assert await notes() == [3, 3]
    await bus.requeue(stale, builders.prompt(1, samples=2))
    await bus.drop(useless, "no_signal")
    assert await notes() == [1, 1]
    await ledger.commit(await ledger.take_epoch(), record(1, 0, 1), [trained], report(1, 1))
    assert await notes() == [0, 0]
