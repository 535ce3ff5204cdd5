"""Laws of what groups carry: it stays where it is from the hand-over to the checkpoint, and nothing of it is left or lost."""

import asyncio
import dataclasses
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.shared.bus.bus import Bus, Delivery
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import GENERATING, PAYLOADS, RUN
from penstock.shared.bus.messages import Experience, PolicyVersion, RolloutGroup
from penstock.shared.bus.stores.experience.dead_letters import DeadLetterSource, newest_reason, read_page, revive
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.policy.rollback import begin_rollback
from penstock.shared.bus.stores.run.records import page, with_payloads
from penstock.shared.bus.streams import EXPERIENCE, JOURNAL, ROLLOUTS
from penstock.shared.errors import Fenced
from tests.conftest import Server
from tests.support import builders
from tests.support.coordinator_players import record, report
from tests.support.raw_redis import raw
from tests.support.shelves import served

STEPS = st.sampled_from(
    ["score", "score", "score", "shown", "old", "take", "die", "commit", "commit", "fenced", "old_trainer"]
    + ["drop", "bury", "revive", "requeue", "checkpoint", "rollback", "restore"]
)


class Model:
    """What a run should hold, beside what its bus holds."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self.ledger = bus, Ledger(bus)
        self.epoch = self.version = self.step = 0
        self.groups = 1 << 30
        """The next number of a group that no admission has given."""
        self.on_stream: dict[int, bytes] = {}
        self.journal: list[tuple[int, bytes]] = []
        self.dead: dict[int, bytes] = {}
        self.taken: list[Delivery[Experience]] = []

    async def start(self) -> None:
        await self.ledger.create()
        await self.ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
        self.epoch = await self.ledger.take_epoch()
        await self.ledger.commit(self.epoch, record(0, None, 0), [], None)
        await self.ledger.set_checkpoint(PolicyVersion(0), "step-0")

    def _new(self) -> tuple[int, Experience]:
        group, self.groups = self.groups, self.groups + 1
        made = builders.experience(group)
        self.on_stream[group] = wire.encode(made)
        return group, made

    async def score(self) -> None:
        """A reward service hands a group over."""
        group, made = self._new()
        await self.bus.publish(ROLLOUTS, made.group, str(group))
        (delivery,) = await self.bus.read(ROLLOUTS, RolloutGroup, "reward-0", 1, None)
        assert await self.bus.hand_over(delivery, EXPERIENCE, made)
        assert not await self.bus.hand_over(delivery, EXPERIENCE, made), "late"

    async def shown(self) -> None:
        """A demonstration is admitted."""
        state = await self.ledger.admission_state()
        if state.state is RunState.RUNNING and state.newest_version is not None:
            made = builders.experience(state.cursor)
            assert await self.ledger.admit([made], 1 << 20, 1 << 20, 1 << 20, state.newest_version) == 1
            self.on_stream[state.cursor] = wire.encode(made)

    async def old(self) -> None:
        """A service of an older release hands a group over."""
        group, made = self._new()
        await self.bus.append(EXPERIENCE, {"id": str(group), "data": wire.encode(made)})

    async def take(self) -> None:
        self.taken += await self.bus.read(EXPERIENCE, Experience, "trainer", 2, None)

    async def die(self) -> None:
        """The trainer is killed; its successor takes again what is still on the stream."""
        self.epoch = await self.ledger.take_epoch()
        self.taken = [delivery async for delivery in self.bus.own(EXPERIENCE, Experience, "trainer")]

    async def old_trainer(self) -> None:
        """A trainer of an older release took the epoch: nothing is put where it does not look."""
        await self.bus.write(RUN, "HINCRBY", "trainer_epoch", 1)
        before = await self.bus.ask("HLEN", PAYLOADS)
        await self.score()
        assert await self.bus.ask("HLEN", PAYLOADS) == before

    async def commit(self) -> None:
        batch, self.taken = self.taken[:2], self.taken[2:]
        if not batch:
            return
        await self.die_if_fenced(batch)

    async def die_if_fenced(self, batch: Sequence[Delivery[Experience]]) -> None:
        status = await self.ledger.status()
        newest = await self._newest()
        made = record(newest + 1, status.tip, status.step + 1)
        try:
            await self.ledger.commit(self.epoch, made, batch, report(made.step, made.version))
        except Fenced:
            assert status.trainer_epoch != self.epoch
            await self.die()
            return
        for delivery in batch:
            self.journal.append((made.step, self.on_stream.pop(int(delivery.group_id))))

    async def _newest(self) -> int:
        newest = (await self.ledger.status()).newest_version
        assert newest is not None
        return int(newest)

    async def fenced(self) -> None:
        if self.taken:
            status = await self.ledger.status()
            made = record(await self._newest() + 1, status.tip, status.step + 1)
            try:
                await self.ledger.commit(self.epoch - 1, made, self.taken, report(made.step, made.version))
            except Fenced:
                return
            raise AssertionError("committed under an older epoch")

    async def drop(self) -> None:
        if self.taken:
            delivery = self.taken.pop()
            assert await self.bus.drop(delivery, "stale")
            del self.on_stream[int(delivery.group_id)]

    async def bury(self) -> None:
        if self.taken:
            delivery = self.taken.pop()
            assert await self.bus.bury(delivery, "unreadable")
            self.dead[int(delivery.group_id)] = self.on_stream.pop(int(delivery.group_id))

    async def revive(self) -> None:
        for entry, fields in await self.bus.xrange(EXPERIENCE.dead, count=1):
            group = int(fields[b"id"])
            assert await self.bus.whole(fields[b"data"]) == self.dead[group]
            assert await revive(self.bus, DeadLetterSource.EXPERIENCE, entry) == 1
            self.on_stream[group] = self.dead.pop(group)

    async def requeue(self) -> None:
        if self.taken:
            delivery = self.taken.pop()
            message = dataclasses.replace(delivery, data=await self.bus.whole(delivery.data)).message()
            assert await self.bus.requeue(delivery, message.group.prompt)
            del self.on_stream[int(delivery.group_id)]

    async def checkpoint(self) -> None:
        await self.ledger.trim_journal(await self.ledger.last_journal_entry() or "0-0")
        self.journal.clear()

    async def rollback(self) -> None:
        status, target = await self.ledger.status(), await self.ledger.policy(PolicyVersion(0))
        assert target is not None
        if await begin_rollback(self.bus, self.ledger, status, target, "") == "ok":
            self.journal.clear()

    async def restore(self) -> None:
        """The bus is taken back to an older checkpoint."""
        cursor = (await self.ledger.admission_state()).cursor
        await self.ledger.restore(0, cursor, 0, PolicyVersion(await self._newest()), {}, (0.0, 0.0), is_known=True)
        self.on_stream.clear()
        self.journal.clear()
        self.taken.clear()

    async def check(self) -> None:
        rows = await self.bus.xrange(EXPERIENCE)
        journal = await self.bus.xrange(JOURNAL)
        named = {entry for entry, fields in rows if not fields[b"data"]}
        named |= {fields[b"entry"].decode() for _, fields in journal}
        held = await self.bus.hgetall(PAYLOADS)
        assert {name.decode() for name in held} == {f"experience:{entry}" for entry in named}
        assert {int(fields[b"id"]) for _, fields in rows} == self.on_stream.keys()
        for delivery in self.taken:
            assert await self.bus.whole(delivery.data) == self.on_stream[int(delivery.group_id)]
        assert [(entry.step, entry.data) for entry in await self.ledger.journal("")] == self.journal
        rows = await with_payloads(self.bus, await page(self.bus, JOURNAL, None, 100))
        newest_first = [fields[b"data"] for _, fields in rows]
        assert newest_first == [data for _, data in reversed(self.journal)]


async def _play(bus: Bus, names: list[str]) -> Model:
    model = Model(bus)
    await model.start()
    for name in names:
        await getattr(model, name)()
        await model.check()
    return model


@settings(max_examples=25)
@given(st.lists(STEPS, max_size=40))
@example(["score", "shown", "take", "drop"])
def test_what_a_group_carries_is_there_until_it_leaves_and_not_after(server: Server, names: list[str]) -> None:
    async def play() -> None:
        bus = await Bus.connect(server.url, f"payloads-{uuid.uuid4().hex[:12]}", wait_s=60.0)
        try:
            await _play(bus, names)
        finally:
            await bus.close()

    asyncio.run(play())


@settings(max_examples=25)
@given(st.lists(STEPS, max_size=40))
def test_so_is_what_it_keeps_on_shelves(server: Server, names: list[str]) -> None:
    async def play(folder: Path) -> None:
        bus = await Bus.connect(server.url, f"shelves-{uuid.uuid4().hex[:12]}", wait_s=60.0)
        try:
            async with served(bus, folder, "reward-0") as shelf, served(bus, folder, "reward-1") as other:
                bus.shelf = shelf
                model = await _play(bus, names)
                for each in (shelf, other):
                    await each.sweep()
                await model.check()
                kept = {int(path.name.partition("-")[0]) for path in folder.glob("*/*")}
                needed = {int(fields[b"id"]) for _, fields in await bus.xrange(JOURNAL)}
                needed |= model.on_stream.keys() | model.dead.keys() | {int(g) for g in await bus.hgetall(GENERATING)}
                assert kept <= needed
        finally:
            await bus.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder)))


async def test_a_commit_takes_the_server_no_longer_for_large_groups(bus: Bus) -> None:
    ledger, sent = Ledger(bus), []
    epoch = await ledger.take_epoch()
    await ledger.commit(epoch, record(0, None, 0), [], None)
    for step, nbytes in ((1, 1000), (2, 20_000_000)):
        await bus.publish(ROLLOUTS, builders.group(step), str(step))
        (delivery,) = await bus.read(ROLLOUTS, RolloutGroup, "reward-0", 1, None)
        await bus.hand_over(delivery, EXPERIENCE, bytes(nbytes))
        batch = await bus.read(EXPERIENCE, Experience, "trainer", 1, None)
        assert len(batch[0].data) == nbytes
        before = (await raw(bus).info("memory"))["used_memory"]
        await ledger.commit(epoch, record(step, step - 1, step), batch, report(step, step))
        sent.append((await raw(bus).info("memory"))["used_memory"] - before)
    assert max(sent) < 100_000, "no byte is copied"
    assert [len(entry.data) for entry in await ledger.journal("")] == [1000, 20_000_000]


async def test_a_step_of_which_a_payload_is_lost_is_not_replayed_in_part(bus: Bus) -> None:
    ledger = Ledger(bus)
    epoch = await ledger.take_epoch()
    await ledger.commit(epoch, record(0, None, 0), [], None)
    for group in (0, 1):
        await bus.publish(ROLLOUTS, builders.group(group), str(group))
        (delivery,) = await bus.read(ROLLOUTS, RolloutGroup, "reward-0", 1, None)
        await bus.hand_over(delivery, EXPERIENCE, builders.experience(group))
    batch = await bus.read(EXPERIENCE, Experience, "trainer", 2, None)
    await ledger.commit(epoch, record(1, 0, 1), batch, report(1, 1))
    assert [entry.step for entry in await ledger.journal("")] == [1, 1]
    await bus.write(PAYLOADS, "HDEL", f"experience:{batch[1].entry_id}")
    assert await ledger.journal("") == []


async def test_a_dead_letter_that_no_process_of_the_run_wrote_is_listed(bus: Bus) -> None:
    await bus.append(ROLLOUTS.dead, {"id": "7", "attempts": "\xc6", "reason": "mine"})
    assert await newest_reason(bus) == "mine"
    await bus.append(ROLLOUTS.dead, {"id": "A" * 100_000, "reason": "long"})
    letters = await read_page(bus, "", 5, None)
    assert [(letter.group, letter.attempts) for letter in letters] == [("7", 0), ("A" * 100, 0)]
