"""Laws of admission and promotion."""

import asyncio
import dataclasses
import time
from collections.abc import Callable

import pytest

from penstock.services.coordinator.admission.admission import Admission, Terms, terms_of
from penstock.services.coordinator.admission.bus_full import Shortage
from penstock.services.coordinator.admission.dataset import Dataset, Problem
from penstock.services.coordinator.admission.mixing import EpochOrder
from penstock.services.coordinator.policies.promotion import CONSUMER, Promotion
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyRecord, PolicyUpdate, PolicyVersion, Prompt, Sampling
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.policy.policies import PolicyState
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat, beat_once
from penstock.shared.settings import Settings
from tests.conftest import PATIENCE_S, until
from tests.support.coordinator_players import Trainer, generating, record

DATASET = Dataset(tuple(Problem(f"train.jsonl:{i + 1}", f"q{i}", None, str(i), {}) for i in range(5)), 0)


def admission(
    bus: Bus, slots: int = 4, steps: int = 100, gate: Callable[[], bool] = lambda: True, *, whole: bool = False
) -> Admission:
    order, ledger = EpochOrder(len(DATASET), seed=0, shuffle=True), Ledger(bus)
    terms = Terms(Sampling(2, 4, 1.0), slots, 2, steps, whole)
    return Admission(bus, ledger, DATASET, order, lambda: terms, gate, Shortage(bus, ledger), 0.001)


async def start(bus: Bus) -> Ledger:
    ledger = Ledger(bus)
    await ledger.create()
    await Trainer(bus).start()
    (published,) = await bus.read(streams.PUBLISHED, PolicyRecord, CONSUMER, 1, 0.1)
    assert await ledger.promote(published)
    await ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    return ledger


async def take(bus: Bus, groups: int) -> None:
    """End the next groups, of two samples each."""
    for delivery in await bus.read(streams.PROMPTS, Prompt, "rollout", 2 * groups, 0.1):
        await bus.drop(delivery, "test")


async def test_admission_fills_the_slots_and_no_more(bus: Bus) -> None:
    ledger = await start(bus)
    assert await admission(bus).admit() == 4
    assert await admission(bus).admit() == 0
    await take(bus, 3)
    assert await admission(bus).admit() == 3
    assert [int(prompt.group_id) for prompt in await generating(bus)] == [3, 4, 5, 6]
    assert (await ledger.status()).cursor == 7


async def test_prompts_carry_the_sampling_of_their_dataset(bus: Bus) -> None:
    await start(bus)
    both = Dataset(DATASET.problems, 0, sizes=(2, 3))
    own = {"b.jsonl": {"max_new_tokens": 8, "top_p": 0.5, "stop": ["\n"]}}
    sampling = {"group_size": 2, "max_new_tokens": 16, "min_p": 0.1, "by_dataset": own}
    settings = Settings.model_validate({"data": {"path": {"a.jsonl": 1, "b.jsonl": 1}}, "sampling": sampling})
    terms = dataclasses.replace(terms_of(settings), slots=5)
    order, ledger = EpochOrder(5, seed=0, shuffle=False), Ledger(bus)
    assert await Admission(bus, ledger, both, order, lambda: terms, lambda: True, Shortage(bus, ledger)).admit() == 5
    first, second = Sampling(2, 16, 1.0, 256, 1.0, 0.1), Sampling(2, 8, 1.0, 256, 0.5, 0.1, 0, ("\n",))
    assert [prompt.sampling for prompt in await generating(bus)] == [first, first, second, second, second]


async def test_prompts_follow_the_order_of_the_seed_and_carry_the_newest_version(bus: Bus) -> None:
    await start(bus)
    await admission(bus, slots=7).admit()
    order = EpochOrder(5, seed=0, shuffle=True)
    prompts = await generating(bus)
    assert [prompt.text for prompt in prompts] == [f"q{order.index(place)}" for place in range(7)]
    assert {prompt.min_version for prompt in prompts} == {0}
    trainer = Trainer(bus)
    trainer.epoch = 1
    await trainer.ledger.commit(1, record(1, 0, 0), [], None)
    await take(bus, 1)
    await admission(bus, slots=7).admit()
    assert (await generating(bus))[-1].min_version == 1


async def test_a_sample_is_an_entry_and_in_a_run_that_repeats_itself_a_group_is(bus: Bus) -> None:
    run = Settings.model_validate({"run": {"deterministic": "run"}, "algorithm": {"max_lag": 0}})
    assert (terms_of(Settings()).whole, terms_of(run).whole) == (False, True)
    await start(bus)
    assert await admission(bus, slots=1).admit() == 1
    assert [delivery.part for delivery in await bus.read(streams.PROMPTS, Prompt, "a", 9, 0.1)] == ["0", "1"]
    assert await admission(bus, slots=2, whole=True).admit() == 1
    assert [delivery.part for delivery in await bus.read(streams.PROMPTS, Prompt, "a", 9, 0.1)] == ["all"]


async def test_a_restart_goes_on_exactly_at_the_cursor(bus: Bus) -> None:
    await start(bus)
    first = admission(bus, slots=3)
    await first.admit()
    await take(bus, 3)
    await admission(bus, slots=3).admit()  # another process
    order = EpochOrder(5, seed=0, shuffle=True)
    assert [(int(p.group_id), p.text) for p in await generating(bus)] == [
        (place, f"q{order.index(place)}") for place in (3, 4, 5)
    ]


async def test_nothing_is_admitted_before_a_version_is_live(bus: Bus) -> None:
    ledger = Ledger(bus)
    await ledger.create()
    await ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    assert await admission(bus).admit() == 0
    await Trainer(bus).start()  # published, not promoted
    assert await admission(bus).admit() == 0


async def test_nothing_is_admitted_beyond_what_the_steps_that_are_left_can_use(bus: Bus) -> None:
    await start(bus)
    assert await admission(bus, slots=100, steps=3).admit() == 6
    assert await admission(bus, slots=100, steps=3).admit() == 0


async def test_after_pause_returns_nothing_is_admitted_and_resume_goes_on_at_the_cursor(bus: Bus) -> None:
    ledger = await start(bus)
    running = admission(bus, slots=4)
    loop = asyncio.create_task(running.run())
    leaving = asyncio.create_task(leave(bus))
    await until(lambda: at_least(ledger, 20))
    changed, _ = await ledger.transition(RunState.PAUSED, "", [RunState.RUNNING])
    paused_at = (await ledger.status()).cursor
    assert changed
    await until(lambda: empty(bus))  # groups in flight end, their slots stay free
    for _ in range(5):
        running.wake()
        assert await running.admit() == 0
    assert (await ledger.status()).cursor == paused_at
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await ledger.transition(RunState.RUNNING, "", [RunState.PAUSED])
    await until(lambda: at_least(ledger, paused_at + 4))
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    assert [int(prompt.group_id) for prompt in await generating(bus)] == list(range(paused_at, paused_at + 4))


async def leave(bus: Bus) -> None:
    while True:
        await take(bus, 2)


async def at_least(ledger: Ledger, cursor: int) -> bool:
    return (await ledger.status()).cursor >= cursor


async def empty(bus: Bus) -> bool:
    return await bus.length(streams.PROMPTS) == 0


async def test_two_admissions_that_race_share_no_group_id_and_keep_to_the_slots(bus: Bus) -> None:
    ledger = await start(bus)
    seen: list[int] = []
    for _ in range(15):
        await asyncio.gather(*(admission(bus, slots=6).admit() for _ in range(4)))
        assert await ledger.in_flight() == 6
        deliveries = await bus.read(streams.PROMPTS, Prompt, "rollout", 10, 0.1)
        seen += [int(delivery.message().group_id) for delivery in deliveries[::2]]
        for delivery in deliveries:
            await bus.drop(delivery, "test")
    assert seen == list(range(75))


async def test_a_closed_gate_holds_admission(bus: Bus) -> None:
    await start(bus)
    opened: list[bool] = []
    held = admission(bus, gate=lambda: bool(opened))
    loop = asyncio.create_task(held.run())
    for _ in range(20):
        assert await empty(bus)
    opened.append(True)
    held.wake()
    await until(lambda: full(bus))
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def full(bus: Bus) -> bool:
    return (await bus.length(streams.PROMPTS), await Ledger(bus).in_flight()) == (8, 4)


async def publish(bus: Bus, versions: int) -> None:
    ledger = Ledger(bus)
    epoch = await ledger.take_epoch()
    for version in range(versions):
        await ledger.commit(epoch, record(version, version - 1 if version else None, 0), [], None)


async def heads(bus: Bus) -> list[int]:
    return [int(update.record.version) for _, update in reversed(await bus.newest(streams.POLICY, PolicyUpdate, 100))]


async def promote_until(bus: Bus, version: int, *parts: Promotion) -> None:
    loops = [asyncio.create_task(part.run()) for part in parts]
    ledger = Ledger(bus)

    async def reached() -> bool:
        return (await ledger.status()).head == version and await bus.length(streams.PUBLISHED) == 0

    await until(reached)
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


async def test_versions_are_promoted_once_and_in_order(bus: Bus) -> None:
    told: list[PolicyVersion] = []
    await publish(bus, 5)
    await promote_until(bus, 4, Promotion(bus, Ledger(bus), 2, told.append))
    assert told == [0, 1, 2, 3, 4]
    assert await heads(bus) == [0, 1, 2, 3, 4]
    states = await Ledger(bus).policy_states()
    assert states == {0: "retired", 1: "retired", 2: "retired", 3: "retired", 4: PolicyState.LIVE}


async def test_replicas_that_stream_weights_are_told_to_pull_from_the_trainer_alone(bus: Bus) -> None:
    addresses = {**{f"rollout-{n}": "" for n in range(4)}, **{f"rollout-{n}": f"h:{n}" for n in range(4, 7)}}
    for name, address in addresses.items():
        now_s = time.time()
        beat = Heartbeat("rollout", name, "working", None, "h", 1, "h:9", now_s, now_s, 0, "", {}, address)
        await beat_once(bus, beat, PATIENCE_S)
    ledger = Ledger(bus)
    served = dataclasses.replace(record(0, None, 0), source="trainer:1")
    await ledger.commit(await ledger.take_epoch(), served, [], None)
    await promote_until(bus, 0, Promotion(bus, ledger, 2, lambda version: None))
    ((_, update),) = await bus.newest(streams.POLICY, PolicyUpdate)
    pulling = dict.fromkeys(addresses, ("trainer:1",))
    assert update.sources == {**pulling, "rollout-6": ("h:4", "trainer:1")}


async def test_a_killed_coordinators_versions_are_promoted_by_the_next(bus: Bus) -> None:
    await publish(bus, 3)
    assert len(await bus.read(streams.PUBLISHED, PolicyRecord, CONSUMER, 2, 0.1)) == 2  # and then it was killed
    await promote_until(bus, 2, Promotion(bus, Ledger(bus), 2, lambda version: None))
    assert await heads(bus) == [0, 1, 2]


async def test_two_coordinators_promote_each_version_at_most_once_and_never_go_back(bus: Bus) -> None:
    await publish(bus, 30)
    parts = [Promotion(bus, Ledger(bus), 2, lambda version: None) for _ in range(2)]
    await promote_until(bus, 29, *parts)
    versions = await heads(bus)
    assert versions == sorted(set(versions))
    assert versions[-1] == 29


async def test_an_older_version_never_takes_the_heads_place(bus: Bus) -> None:
    await publish(bus, 2)
    older, newer = await bus.read(streams.PUBLISHED, PolicyRecord, CONSUMER, 2, 0.1)
    ledger = Ledger(bus)
    assert await ledger.promote(newer)
    assert not await ledger.promote(older)
    assert (await ledger.status()).head == 1
    assert await ledger.policy_states() == {0: PolicyState.RETIRED, 1: PolicyState.LIVE}
    assert await bus.length(streams.PUBLISHED) == 0


async def test_a_record_that_cannot_be_read_is_buried_and_the_next_one_promoted(bus: Bus) -> None:
    await bus.append(streams.PUBLISHED, {"id": "0", "data": b"no"})
    await publish(bus, 1)
    await promote_until(bus, 0, Promotion(bus, Ledger(bus), 2, lambda version: None))
    assert await bus.length(streams.PUBLISHED.dead) == 1


@pytest.mark.parametrize("is_emptied", [False, True])
async def test_a_loop_over_the_bus_stops_whenever_it_is_cancelled(bus: Bus, is_emptied: bool) -> None:
    async def look_for_ever() -> None:
        while True:
            await bus.length(streams.PROMPTS)
            if is_emptied:
                await bus.write(streams.PUBLISHED, "DEL")  # its group is missing: an error is the answer
                await bus.read(streams.PUBLISHED, PolicyRecord, "coordinator", 1, 0.001)

    for pause in range(300):  # at any moment: Python 3.11's wait_for would swallow some
        loop = asyncio.create_task(look_for_ever())
        for _ in range(1 + pause % 60):
            await asyncio.sleep(0)
        loop.cancel()
        done, _ = await asyncio.wait([loop], timeout=PATIENCE_S)
        assert done
