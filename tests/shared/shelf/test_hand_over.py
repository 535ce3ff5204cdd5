"""Laws of groups whose payloads are on shelves: each ends exactly once, whatever is lost, and only lost ones are made again."""

import asyncio
import dataclasses
import shutil
import tempfile
import uuid
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.bus.assembly import bare
from penstock.shared.bus.bus import Bus, Delivery
from penstock.shared.bus.claims import MOST_LOSSES, Claim, is_claim, regenerate
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, PolicyVersion, Prompt, RolloutGroup
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.streams import EXPERIENCE, PROMPTS, ROLLOUTS
from penstock.shared.errors import MessageError, ShelfLost
from tests.conftest import Server
from tests.support import builders
from tests.support.coordinator_players import record, report
from tests.support.raw_redis import raw
from tests.support.shelves import LIMITS, reader, served

STEPS = st.sampled_from(["generate", "generate", "generate", "score", "train", "lose", "die"])
GROUPS = 3


class Fleet:
    """Two replicas that generate, one that scores, and a trainer, each with its bus and shelf."""

    def __init__(self, buses: dict[str, Bus], folder: Path) -> None:
        self.buses, self.folder = buses, folder
        self.bus = buses["trainer"]
        self.ledger = Ledger(self.bus)
        self.lost = self.turn = 0
        self.trained: list[int] = []

    async def start(self) -> None:
        await self.ledger.create()
        await self.ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
        await self.ledger.commit(await self.ledger.take_epoch(), record(0, None, 0), [], None)
        prompts = [builders.prompt(group) for group in range(GROUPS)]
        assert await self.ledger.admit(prompts, 100, 100, 100, PolicyVersion(0)) == GROUPS

    async def generate(self) -> bool:
        self.turn += 1
        replica = ("rollout-0", "rollout-1")[self.turn % 2]
        bus = self.buses[replica]
        taken = await bus.read(PROMPTS, Prompt, replica, 1, None)
        for delivery in taken:
            prompt = delivery.message()
            made = dataclasses.replace(
                builders.group(prompt.group_id), prompt=bare(prompt), samples=(builders.sample(),)
            )
            assert await bus.hand_over(delivery, ROLLOUTS, made)
        return bool(taken)

    async def score(self) -> bool:
        bus = self.buses["reward-0"]
        taken = await bus.read(ROLLOUTS, RolloutGroup, "reward-0", 1, None)
        for delivery in taken:
            if (whole := await self._whole(bus, delivery)) is not None:
                group = whole.message()
                assert len(group.samples) == 2
                made = dataclasses.replace(builders.experience(group.group_id), group=group)
                assert await bus.hand_over(delivery, EXPERIENCE, made)
        return bool(taken)

    async def train(self) -> bool:
        taken = await self.bus.read(EXPERIENCE, Experience, "trainer", 1, None)
        for delivery in taken:
            if (whole := await self._whole(self.bus, delivery)) is not None:
                assert whole.message().group.prompt.answer == "46", "the group's own prompt"
                assert await self.bus.drop(delivery, "stale")
                self.trained.append(int(delivery.group_id))
        return bool(taken)

    async def _whole(self, bus: Bus, delivery: Delivery[RolloutGroup] | Delivery[Experience]) -> Delivery | None:  # type: ignore[type-arg]
        try:
            return dataclasses.replace(delivery, data=await bus.whole(delivery.data))
        except ShelfLost as error:
            self.lost += 1
            await regenerate(bus, delivery, error)
            return None

    async def lose(self) -> bool:
        """Every copy of the oldest payload is lost."""
        files = sorted(self.folder.glob("*/[0-9]*"), key=lambda path: path.stat().st_mtime_ns)
        for path in files:
            if path.name == files[0].name:
                path.unlink()
        return False

    async def die(self) -> bool:
        """A replica's host is gone, and comes back empty."""
        shutil.rmtree(self.folder / "rollout-0", ignore_errors=True)
        return False

    async def check(self) -> None:
        counts = await self.bus.counts()
        assert counts.get("unavailable", 0) == self.lost
        assert counts.get("dropped:stale", 0) == len(self.trained) == len(set(self.trained))
        assert await self.ledger.in_flight() == GROUPS - len(self.trained)


@settings(max_examples=30)
@given(st.lists(STEPS, max_size=40))
def test_every_group_ends_once_whatever_is_lost(server: Server, names: list[str]) -> None:
    async def play(folder: Path) -> None:
        run = f"hand-over-{uuid.uuid4().hex[:12]}"
        names_of = ("rollout-0", "rollout-1", "reward-0", "trainer")
        buses = {name: await Bus.connect(server.url, run, wait_s=60.0) for name in names_of}
        try:
            async with (
                served(buses["rollout-0"], folder, "rollout-0") as first,
                served(buses["rollout-1"], folder, "rollout-1") as second,
                served(buses["reward-0"], folder, "reward-0") as third,
            ):
                buses["rollout-0"].shelf, buses["rollout-1"].shelf, buses["reward-0"].shelf = first, second, third
                buses["trainer"].shelf = reader(buses["trainer"], folder)
                fleet = Fleet(buses, folder)
                await fleet.start()
                for name in names:
                    await getattr(fleet, name)()
                    await fleet.check()
                while await fleet.generate() or await fleet.score() or await fleet.train():
                    await fleet.check()
                assert sorted(fleet.trained) == list(range(GROUPS))
                for shelf in (first, second, third):
                    await shelf.sweep()
                assert list(folder.glob("*/[0-9]*")) == [], "nothing is left of groups that have ended"
        finally:
            for bus in buses.values():
                await bus.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder)))


async def test_a_claim_is_small_and_one_of_a_scored_group_has_its_prompt(bus: Bus, tmp_path: Path) -> None:
    async with served(bus, tmp_path, "a") as bus.shelf, served(bus, tmp_path, "b"):
        fleet = Fleet({"rollout-0": bus, "rollout-1": bus, "reward-0": bus, "trainer": bus}, tmp_path)
        await fleet.start()
        for _ in range(2 * GROUPS):
            assert await fleet.generate()
        (first, *_) = await bus.xrange(ROLLOUTS)
        assert len(first[1][b"data"]) < 1000
        assert await fleet.score()
        (taken,) = await bus.read(EXPERIENCE, Experience, "trainer", 1, None)
        assert is_claim(taken.data)
        claim = wire.decode(taken.data, Claim)
        assert wire.decode(claim.prompt, Prompt) == builders.prompt(int(taken.group_id))
        assert len(wire.decode(await bus.whole(taken.data), Experience).group.samples) == 2


async def test_a_group_whose_payload_is_lost_again_and_again_is_buried(bus: Bus, tmp_path: Path) -> None:
    async with served(bus, tmp_path, "a") as bus.shelf, served(bus, tmp_path, "b"):
        worn = dataclasses.replace(builders.prompt(0), losses=MOST_LOSSES)
        await bus.publish(ROLLOUTS, dataclasses.replace(builders.group(0), prompt=worn), "0")
        (taken,) = await bus.read(ROLLOUTS, RolloutGroup, "reward-0", 1, None)
        assert await bus.hand_over(
            taken, EXPERIENCE, dataclasses.replace(builders.experience(0), group=taken.message())
        )
        (scored,) = await bus.read(EXPERIENCE, Experience, "trainer", 1, None)
        await regenerate(bus, scored, ShelfLost("gone"))
        assert await bus.counts() == {"dead:experience": 1}
        ((_, fields),) = await bus.xrange(EXPERIENCE.dead)
        assert b"gone" in fields[b"reason"]


async def test_a_group_that_was_stale_many_times_is_not_buried_when_its_payload_is_lost(
    bus: Bus, tmp_path: Path
) -> None:
    async with served(bus, tmp_path, "a") as bus.shelf, served(bus, tmp_path, "b"):
        stale = dataclasses.replace(builders.prompt(0), requeues=100)
        await bus.publish(ROLLOUTS, dataclasses.replace(builders.group(0), prompt=stale), "0")
        (taken,) = await bus.read(ROLLOUTS, RolloutGroup, "reward-0", 1, None)
        assert await bus.hand_over(
            taken, EXPERIENCE, dataclasses.replace(builders.experience(0), group=taken.message())
        )
        (scored,) = await bus.read(EXPERIENCE, Experience, "trainer", 1, None)
        await regenerate(bus, scored, ShelfLost("gone"))
        assert await bus.counts() == {"unavailable": 1}
        again = (await bus.read(PROMPTS, Prompt, "rollout-0", 1, None))[0].message()
        assert (again.group_id, again.requeues, again.losses, again.sample) == (0, 101, 1, 0)


async def test_a_lost_claim_with_the_prompt_of_another_group_is_buried(bus: Bus) -> None:
    claim = Claim(0, "0" * 64, 10, (), wire.encode(builders.prompt(7)))
    await raw(bus).xadd(bus.keys.of(EXPERIENCE), {"id": "0", "data": wire.encode(claim)})
    (taken,) = await bus.read(EXPERIENCE, Experience, "trainer", 1, None)
    await regenerate(bus, taken, ShelfLost("gone"))
    assert await bus.counts() == {"dead:experience": 1}
    ((_, fields),) = await bus.xrange(EXPERIENCE.dead)
    assert fields[b"reason"] == b"expected the prompt of group '0', found 7's"


async def test_a_step_is_replayed_from_shelves_and_not_if_a_payload_of_it_is_lost(bus: Bus, tmp_path: Path) -> None:
    ledger = Ledger(bus)
    epoch = await ledger.take_epoch()
    await ledger.commit(epoch, record(0, None, 0), [], None)
    async with served(bus, tmp_path, "a") as bus.shelf, served(bus, tmp_path, "b"):
        for group in (0, 1):
            await bus.publish(ROLLOUTS, builders.group(group), str(group))
            (delivery,) = await bus.read(ROLLOUTS, RolloutGroup, "reward-0", 1, None)
            assert await bus.hand_over(delivery, EXPERIENCE, builders.experience(group))
        batch = await bus.read(EXPERIENCE, Experience, "trainer", 2, None)
        await ledger.commit(epoch, record(1, 0, 1), batch, report(1, 1))
        replayed = [wire.decode(entry.data, Experience).group_id for entry in await ledger.journal("")]
        assert replayed == [0, 1]
        for path in tmp_path.glob("*/1-*"):
            path.unlink()
        assert await ledger.journal("") == [], "the run goes back to its checkpoint"


@pytest.mark.parametrize("spoiled", ["digest", "holders", "array", "cut"])
async def test_a_malformed_claim_is_refused_and_ends_nothing(bus: Bus, tmp_path: Path, spoiled: str) -> None:
    claim = Claim(0, "0" * 64, 10, (), b"")
    data = {
        "digest": wire.encode(dataclasses.replace(claim, digest="../x")),
        "holders": msgpack.packb({"kind": "claim", "schema": 1, **dataclasses.asdict(claim), "holders": "a"}),
        "array": b"\xdd\xff\xff\xff\xff",
        "cut": wire.encode(claim)[:-5],
    }[spoiled]
    bus.shelf = reader(bus, tmp_path, LIMITS)
    await raw(bus).xadd(bus.keys.of(EXPERIENCE), {"id": "0", "data": data})
    (taken,) = await bus.read(EXPERIENCE, Experience, "trainer", 1, None)
    with pytest.raises(MessageError):
        dataclasses.replace(taken, data=await bus.whole(taken.data)).message()
    await regenerate(bus, taken, ShelfLost("gone"))
    assert await bus.counts() == {"dead:experience": 1}
