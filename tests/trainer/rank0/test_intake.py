"""Laws of the trainer's intake."""

import asyncio
import contextlib
import dataclasses
import hashlib
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.services.trainer.algorithm import group_filter
from penstock.services.trainer.rank0 import intake as intake_module
from penstock.services.trainer.rank0.intake import CONSUMER, Intake, Taken
from penstock.shared.bus.bus import _PAGE_ENTRIES, Bus, Delivery
from penstock.shared.bus.claims import Claim
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import GENERATING, RUN
from penstock.shared.bus.messages import Event, Experience, PolicyVersion, Prompt, Purpose, RolloutGroup, Sample
from penstock.shared.bus.stores.policy.ledger import TRAINED, Ledger, RunState, Standing
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.streams import EVENTS, EXPERIENCE, PROMPTS, ROLLOUTS
from penstock.shared.errors import Fenced, ShelfLost
from penstock.shared.settings import Settings
from tests.conftest import PATIENCE_S, until
from tests.support import builders, filter_functions
from tests.support.coordinator_players import generating
from tests.support.raw_redis import raw

V = PolicyVersion
FILTERS = "tests.support.filter_functions"


def settings(on_stale: str = "drop", max_lag: int = 1) -> Settings:
    return Settings.model_validate(
        {"algorithm": {"groups_per_step": 2, "max_lag": max_lag, "on_stale": on_stale}, "internal": {"max_attempts": 2}}
    )


async def put(bus: Bus, group_id: int, version: int = 0) -> None:
    experience = builders.experience(group_id, version=version)
    await bus.append(EXPERIENCE, {"id": str(group_id), "data": wire.encode(experience)})


@contextlib.asynccontextmanager
async def filling(intake: Intake) -> AsyncIterator[None]:
    task = asyncio.create_task(intake.fill())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_batch_is_the_groups_admitted_first_and_they_stay_pending(bus: Bus) -> None:
    for group_id in (5, 8, 3):
        await put(bus, group_id)
    intake = Intake(bus, Live(bus, settings()), {V(0): 0})
    async with filling(intake):
        await until(lambda: len(intake._held) == 3)
        batch = await intake.next_batch(0, wait_s=PATIENCE_S)
    assert batch is not None
    assert [taken.experience.group.prompt.group_id for taken in batch] == [3, 5]
    assert (await bus.depth(EXPERIENCE)).pending == 3


def of_lengths(group_id: int, *lengths: int, rewards: tuple[float, ...] = (1.0, 0.0)) -> Experience:
    """Return a group with a prompt of 3 tokens and samples of these lengths."""
    made = builders.experience(group_id, rewards)
    samples = tuple(builders.sample(tokens=length) for length in lengths)
    return dataclasses.replace(made, group=dataclasses.replace(made.group, samples=samples))


def limited(most_tokens: int, **algorithm: Any) -> Settings:
    return Settings.model_validate(
        {"algorithm": {"groups_per_step": 2, **algorithm}, "trainer": {"micro_batch_tokens": most_tokens}}
    )


async def send(bus: Bus, experience: Experience) -> None:
    await bus.append(EXPERIENCE, {"id": str(experience.group_id), "data": wire.encode(experience)})


async def test_a_sample_that_fits_no_forward_pass_loses_itself_and_not_its_group(bus: Bus) -> None:
    for experience in (of_lengths(0, 5, 6), of_lengths(1, 5, 5), of_lengths(2, 6, 6)):
        await send(bus, experience)
    intake = Intake(bus, Live(bus, limited(8)), {V(0): 0})
    async with filling(intake):
        batch = await intake.next_batch(0, wait_s=PATIENCE_S)
        await until(lambda: intake.left["too_long"] == 1)
    assert batch is not None
    assert {taken.experience.group_id: taken.contexts for taken in batch} == {0: (0, 6), 1: (0, 0)}
    assert await bus.counts() == {"dropped:too_long": 1}


@pytest.mark.parametrize("algorithm", [{"preset": "dpo"}, {"kl": {"coefficient": 0.1, "estimator": "k1"}}])
async def test_where_whole_samples_are_compared_a_long_one_takes_its_group_along(
    bus: Bus, algorithm: dict[str, Any]
) -> None:
    await send(bus, of_lengths(0, 2, 16))
    intake = Intake(bus, Live(bus, limited(18, **algorithm)), {V(0): 0})
    async with filling(intake):
        await until(lambda: intake.left["too_long"] == 1)


async def test_a_run_of_which_no_group_fits_a_forward_pass_is_paused(bus: Bus) -> None:
    ledger = Ledger(bus)
    await ledger.create()
    await ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    for group_id in range(4):  # slots: two groups a step, a lag of 1
        assert (await ledger.status()).state is RunState.RUNNING
        await send(bus, of_lengths(group_id, 6, 7))
    intake = Intake(bus, Live(bus, limited(8)), {V(0): 0})
    async with filling(intake):
        await until(lambda: intake.left["too_long"] == 4)
        status = await ledger.status()
        while status.state is not RunState.PAUSED:
            await asyncio.sleep(0.01)
            status = await ledger.status()
    assert (
        "none of the last 4 groups fits trainer.micro_batch_tokens = 8, the newest has 10 tokens: raise it"
        in status.reason
    )


async def test_rewards_below_zero_are_buried_where_they_would_be_learned_in_reverse(bus: Bus) -> None:
    await send(bus, of_lengths(0, 2, 2, rewards=(1.0, -1.0)))
    await send(bus, of_lengths(1, 2, 2, rewards=(1.0, 0.0)))
    intake = Intake(bus, Live(bus, limited(8, preset="maxrl")), {V(0): 0})
    async with filling(intake):
        await until(lambda: intake.left["buried"] == 1 and len(intake._held) == 1)
    assert await bus.counts() == {"dead:experience": 1}


async def test_what_a_trainer_that_died_had_taken_is_taken_again_however_much_it_is(bus: Bus) -> None:
    groups = 2 * _PAGE_ENTRIES + 1
    for group_id in range(groups):
        await put(bus, group_id)
    assert len(await bus.read(EXPERIENCE, Experience, CONSUMER, groups, None)) == groups
    intake = Intake(bus, Live(bus, settings()), {V(0): 0})
    async with filling(intake):
        await until(lambda: len(intake._held) == groups)


async def test_what_a_broken_connection_lost_is_taken_again_once(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Bus.read
    lost: list[Delivery[Any]] = []

    async def losing(bus: Bus, *words: Any) -> list[Delivery[Any]]:
        deliveries: list[Delivery[Any]] = await read(bus, *words)
        if len(lost) < 1 and any(delivery.group_id == "1" for delivery in deliveries):
            lost.extend(deliveries)
            return []
        return deliveries

    monkeypatch.setattr(Bus, "read", losing)
    monkeypatch.setattr(intake_module, "_LOST_LOOK_S", 0.0)
    intake = Intake(bus, Live(bus, settings()), {V(0): 0})
    async with filling(intake):
        await put(bus, 0)
        await until(lambda: len(intake._held) == 1)
        await put(bus, 1)
        batch = await intake.next_batch(0, wait_s=PATIENCE_S)
    assert batch is not None
    assert [taken.delivery.attempts for taken in batch] == [1, 1]
    assert len(lost) == 1
    assert await bus.counts() == {}, "what is held is no duplicate of itself"


async def test_an_entry_that_the_bus_delivers_again_is_no_duplicate_of_itself(bus: Bus) -> None:
    await put(bus, 0)
    intake = Intake(bus, Live(bus, settings()), {V(0): 0})
    async with filling(intake):
        await until(lambda: len(intake._held) == 1)
        key = bus.keys.of(EXPERIENCE)
        await raw(bus).xgroup_setid(key, EXPERIENCE.group, "0")  # as a server that lost the delivery
        await put(bus, 1)
        await until(lambda: len(intake._held) == 2)
        assert await bus.counts() == {}
        assert await bus.length(EXPERIENCE) == 2


async def test_without_enough_groups_there_is_no_batch(bus: Bus) -> None:
    await put(bus, 0)
    intake = Intake(bus, Live(bus, settings()), {V(0): 0})
    async with filling(intake):
        assert await intake.next_batch(0, wait_s=0.3) is None


async def test_a_stale_group_is_dropped_and_counted(bus: Bus) -> None:
    steps = {V(0): 0, V(1): 1, V(2): 2}
    for group_id, version in ((0, 0), (1, 1), (2, 2)):
        await put(bus, group_id, version)
    intake = Intake(bus, Live(bus, settings()), steps)
    async with filling(intake):
        batch = await intake.next_batch(2, wait_s=PATIENCE_S)
    assert batch is not None
    assert [taken.experience.group.prompt.group_id for taken in batch] == [1, 2]
    assert await bus.counts() == {"dropped:stale": 1}


async def test_what_arrives_while_others_are_let_go_is_looked_at_before_it_is_trained(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await raw(bus).execute_command("SADD", bus.keys.named("revoked"), 7)
    await put(bus, 0, version=7)
    await put(bus, 1, version=0)
    intake = Intake(bus, Live(bus, settings()), {V(0): 0, V(7): 0})
    drop = intake._drop

    async def drop_while_another_arrives(delivery: Delivery[Experience], reason: str, detail: str) -> None:
        if delivery.group_id == "0":
            await put(bus, 2, version=7)
            await until(lambda: 2 in intake._held)
        await drop(delivery, reason, detail)

    monkeypatch.setattr(intake, "_drop", drop_while_another_arrives)
    async with filling(intake):
        await until(lambda: _ended_without_a_batch(bus, intake, 0, {"dropped:fenced": 2}))


async def test_a_requeued_group_goes_back_to_the_prompts_for_the_newest_weights_and_has_not_ended(bus: Bus) -> None:
    await put(bus, 0, version=0)
    await put(bus, 1, version=5)
    intake = Intake(bus, Live(bus, settings("requeue")), {V(0): 0, V(5): 5})
    async with filling(intake):
        await until(lambda: _ended_without_a_batch(bus, intake, 5, {"requeued": 1}))
    prompts = [delivery.message() for delivery in await bus.read(PROMPTS, Prompt, "a", 10, block_s=0.5)]
    assert [(prompt.group_id, prompt.sample, prompt.requeues, prompt.min_version) for prompt in prompts] == [
        (0, 0, 1, 5),
        (0, 1, 1, 5),
    ]
    assert await bus.counts() == {"requeued": 1}
    assert await Ledger(bus).in_flight() == 2, "it, and the group that is fresh"


def mixed(group_id: int, *versions: int) -> Experience:
    """A group whose samples begin under ``versions`` and end, after two of three tokens, under version 5."""
    made = builders.experience(group_id, (1.0, *[0.0] * (len(versions) - 1)))
    samples = tuple(
        dataclasses.replace(sample, text=f"{version}", version_spans=np.array([[0, version], [2, 5]], np.int32))
        for sample, version in zip(made.group.samples, versions, strict=True)
    )
    return dataclasses.replace(made, group=dataclasses.replace(made.group, samples=samples))


@pytest.mark.parametrize(
    ("algorithm", "contexts", "counts"),
    [
        ({"on_stale": "drop"}, {1: (0, 3), 2: (0, 0)}, {"dropped:stale": 1}),
        ({"on_stale": "wait"}, {1: (0, 3), 2: (0, 0)}, {"dropped:stale": 1}),
        ({"on_stale": "mask"}, {0: (2, 2), 1: (0, 2)}, {}),
        ({"on_stale": "drop", "preset": "dpo"}, {2: (0, 0), 3: (0, 0)}, {"dropped:stale": 2}),
    ],
)
async def test_stale_samples_are_left_out_and_the_rest_of_their_group_is_trained(
    bus: Bus, algorithm: dict[str, object], contexts: dict[int, tuple[int, ...]], counts: dict[str, int]
) -> None:
    of = {"groups_per_step": 2, "max_lag": 1, "dynamic_sampling": False, **algorithm}
    for group_id, versions in enumerate([(3, 3), (4, 3), (5, 5), (5, 4)]):
        experience = mixed(group_id, *versions)
        await bus.append(EXPERIENCE, {"id": str(group_id), "data": wire.encode(experience)})
    intake = Intake(bus, Live(bus, Settings.model_validate({"algorithm": of})), {V(n): n for n in range(6)})
    async with filling(intake):
        await until(lambda: len(intake._held) == 4)
        batch = await intake.next_batch(5, wait_s=PATIENCE_S)
    assert batch is not None
    assert {int(taken.experience.group_id): taken.contexts for taken in batch} == contexts
    assert await bus.counts() == counts


async def test_only_the_stale_samples_of_a_requeued_group_are_generated_again(bus: Bus) -> None:
    await bus.append(EXPERIENCE, {"id": "0", "data": wire.encode(mixed(0, 4, 3, 5))})
    await bus.append(EXPERIENCE, {"id": "1", "data": wire.encode(mixed(1, 5, 5, 5))})
    intake = Intake(bus, Live(bus, settings("requeue")), {V(n): n for n in range(6)})
    async with filling(intake):
        await until(lambda: _ended_without_a_batch(bus, intake, 5, {"requeued": 1}))
    (delivery,) = await bus.read(PROMPTS, Prompt, "a", 10, block_s=0.5)
    prompt = delivery.message()
    assert (prompt.group_id, prompt.sample, prompt.requeues, prompt.min_version) == (0, 1, 1, 5)
    assert await bus.hand_over(delivery, ROLLOUTS, builders.part(prompt, version=5, text="again"))
    (whole,) = await bus.read(ROLLOUTS, RolloutGroup, "a", 10, block_s=0.5)
    group = whole.message()
    assert [sample.text for sample in group.samples] == ["4", "again", "5"]
    assert [sample.oldest_version for sample in group.samples] == [4, 5, 5]
    assert (group.prompt.requeues, await Ledger(bus).in_flight()) == (1, 2)


async def test_a_group_that_is_stale_again_is_generated_again_as_a_whole(bus: Bus) -> None:
    again = mixed(0, 4, 3, 5)
    prompt = dataclasses.replace(again.group.prompt, requeues=1)
    again = dataclasses.replace(again, group=dataclasses.replace(again.group, prompt=prompt))
    await bus.append(EXPERIENCE, {"id": "0", "data": wire.encode(again)})
    await bus.append(EXPERIENCE, {"id": "1", "data": wire.encode(mixed(1, 5, 5, 5))})
    intake = Intake(bus, Live(bus, settings("requeue")), {V(n): n for n in range(6)})
    async with filling(intake):
        await until(lambda: _ended_without_a_batch(bus, intake, 5, {"requeued": 1}))
    prompts = [delivery.message() for delivery in await bus.read(PROMPTS, Prompt, "a", 10, block_s=0.5)]
    assert [(prompt.sample, prompt.requeues) for prompt in prompts] == [(0, 2), (1, 2), (2, 2)]
    assert await intake.take_left() == {"requeued": 1}


async def test_a_group_that_ends_the_trainer_is_tried_alone_and_takes_no_other_with_it(bus: Bus) -> None:
    for group_id in range(8):
        await put(bus, group_id)
    deaths = 0
    trained: list[int] = []
    while len(trained) < 6:
        intake = Intake(bus, Live(bus, settings()), {V(0): 0})
        async with filling(intake):
            died = await _train_until_death(bus, intake, trained, poison=3)
        deaths += died
    assert deaths == 4, "twice in its batch, and twice alone"
    assert trained == [0, 1, 2, 4, 5, 6]
    assert await bus.counts() == {"dead:experience": 1, "dropped:trained": 6}
    ((_, dead),) = await raw(bus).xrange(bus.keys.of(EXPERIENCE.dead))
    assert dead[b"id"] == b"3"
    assert dead[b"reason"] == b"ended the trainer 2 times when it was tried alone: ValueError: poison"
    assert await raw(bus).hgetall(bus.keys.named("crashes")) == {}


async def _train_until_death(bus: Bus, intake: Intake, trained: list[int], poison: int) -> bool:
    """Train like rank 0; death leaves entries held."""
    while len(trained) < 6:
        if (suspect := await intake.next_suspect()) is not None:
            if suspect.experience.group_id == poison:
                await intake.note_tried("ValueError: poison")
                return True
            await intake.note_tried()
            continue
        batch = await intake.next_batch(0, wait_s=PATIENCE_S)
        assert batch is not None
        await intake.note_batch(batch)
        groups = [int(taken.experience.group_id) for taken in batch]
        if poison in groups:
            return True
        for taken in batch:
            await bus.drop(taken.delivery, "trained")
        intake.release(batch)
        trained += groups
    return False


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vocabulary": 3}, "expected token ids below the model's 3, found 7"),
        ({"context_tokens": 5}, "expected sequences within the model's 5 tokens, found 6"),
    ],
)
async def test_a_group_that_the_model_cannot_read_is_buried_at_once(
    bus: Bus, change: dict[str, int], reason: str
) -> None:
    await put(bus, 0)
    intake = Intake(bus, Live(bus, settings()), {V(0): 0})
    for name, value in change.items():
        setattr(intake, name, value)
    async with filling(intake):
        await until(lambda: _buried(bus))
    assert await _reasons(bus) == [(reason, "1")]


@pytest.mark.parametrize(
    ("possible", "reason"),
    [
        (0, "expected the tokens that could be drawn with each sample of truncated sampling, found none"),
        (4096, ""),
        (4097, "expected at most 4096 tokens that could be drawn at a position, for which the trainer has memory"),
    ],
)
async def test_truncated_samples_come_with_supports_that_fit_into_memory(bus: Bus, possible: int, reason: str) -> None:
    experience = builders.experience()
    sampling = dataclasses.replace(experience.group.prompt.sampling, top_k=256)
    supports: dict[str, Any] = {
        "support_sizes": np.array([possible, 1, 1] if possible else [], np.int32),
        "support_ids": np.array([*range(possible), 1, 2] if possible else [], np.int32),
    }
    samples = tuple(dataclasses.replace(sample, **supports) for sample in experience.group.samples)
    prompt = dataclasses.replace(experience.group.prompt, sampling=sampling)
    group = dataclasses.replace(experience.group, prompt=prompt, samples=samples)
    truncated = dataclasses.replace(experience, group=group)
    await bus.append(EXPERIENCE, {"id": "0", "data": wire.encode(truncated)})
    intake = Intake(bus, Live(bus, settings()), {V(0): 0})
    async with filling(intake):
        await until(lambda: _buried(bus) if reason else len(intake._held) == 1)
    assert [words.startswith(reason) for words, _ in await _reasons(bus)] == [True] * bool(reason)


async def test_groups_that_were_never_admitted_or_of_versions_that_do_not_exist_are_buried_at_once(bus: Bus) -> None:
    await raw(bus).hset(bus.keys.named("run"), mapping={"cursor": 2, "newest_version": 4})
    for group_id, version in ((0, 5), (2, 4), (1, 4)):
        await put(bus, group_id, version)
    intake = Intake(bus, Live(bus, settings()), {V(0): 0})
    async with filling(intake):
        await until(lambda: len(intake._held) == 1 and intake.left["buried"] == 2)
    assert await _reasons(bus) == [
        ("expected versions up to 4, the newest, found samples of 5", "1"),
        ("expected a group that was admitted, found one of the id 2", "1"),
    ]


async def test_a_group_of_a_version_that_the_bus_lost_is_generated_again_by_a_known_one(bus: Bus) -> None:
    await raw(bus).hset(bus.keys.named("run"), mapping={"cursor": 2, "newest_version": 6})
    for group_id, version in ((0, 5), (1, 6)):  # 4 and 5 are lost; 6 was published after them
        await put(bus, group_id, version)
    intake = Intake(bus, Live(bus, settings()), {V(3): 3, V(6): 3})
    async with filling(intake):
        await until(lambda: len(intake._held) == 2)
        assert await intake.next_batch(3, 0.1) is None
        assert list(intake._held) == [1]
    (again,) = await generating(bus)
    assert (again.group_id, again.min_version, again.requeues) == (0, 6, 1)
    assert await bus.counts() == {"requeued": 1}


async def test_a_trainer_whose_own_version_the_bus_has_lost_ends_and_the_group_stays(bus: Bus) -> None:
    await raw(bus).hset(bus.keys.named("run"), mapping={"cursor": 1, "newest_version": 3})
    await put(bus, 0, 5)
    with pytest.raises(Fenced, match="it has older data"):
        await Intake(bus, Live(bus, settings()), {V(3): 3, V(5): 5}).fill()
    assert await bus.length(EXPERIENCE) == 1


async def test_a_copy_of_a_group_that_was_trained_is_dropped(bus: Bus) -> None:
    await raw(bus).setbit(bus.keys.named("trained"), 7, 1)
    await put(bus, 7)
    async with filling(Intake(bus, Live(bus, settings()), {V(0): 0})):
        await until(lambda: _counted(bus, {"dropped:duplicate": 1}))


async def _counted(bus: Bus, counts: dict[str, int]) -> bool:
    return await bus.counts() == counts


async def _reasons(bus: Bus) -> list[tuple[str, str]]:
    dead = await raw(bus).xrange(bus.keys.of(EXPERIENCE.dead))
    return [(fields[b"reason"].decode(), fields[b"attempts"].decode()) for _, fields in dead]


def dynamic() -> Settings:
    algorithm = {"groups_per_step": 2, "preset": "dapo"}
    return Settings.model_validate({"algorithm": algorithm})


async def test_with_dynamic_sampling_groups_without_signal_leave_counted_and_free_their_slots(bus: Bus) -> None:
    for group_id, rewards in enumerate([(1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (0.0, 1.0)]):
        experience = builders.experience(group_id, rewards)
        await bus.append(EXPERIENCE, {"id": str(group_id), "data": wire.encode(experience)})
    intake = Intake(bus, Live(bus, dynamic()), {V(0): 0})
    async with filling(intake):
        batch = await intake.next_batch(0, wait_s=PATIENCE_S)
    assert batch is not None
    assert [taken.experience.group.prompt.group_id for taken in batch] == [1, 3]
    assert await bus.counts() == {"dropped:no_signal": 2}
    assert intake.left["no_signal"] == 2
    assert await bus.length(EXPERIENCE) == 2, "two slots are free again"


def filtered(name: str, **more: Any) -> Settings:
    return Settings.model_validate({"algorithm": {"groups_per_step": 2, "filter": f"{FILTERS}:{name}", **more}})


async def test_groups_that_a_users_filter_does_not_keep_leave_counted_and_what_it_fails_for_is_buried(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(filter_functions.SEEN, str(tmp_path / "seen"))
    for group_id, rewards in enumerate([(0.0, 1.0), (1.0, 0.0), (2.0, 0.0), (1.0, 1.0)]):
        experience = builders.experience(group_id, rewards)
        await bus.append(EXPERIENCE, {"id": str(group_id), "data": wire.encode(experience)})
    intake = Intake(bus, Live(bus, filtered("keeping")), {V(0): 0})
    async with filling(intake):
        assert ids(await intake.next_batch(0, wait_s=PATIENCE_S)) == [1, 3]
    assert await bus.counts() == {"dropped:filtered": 1, "dead:experience": 1}
    ((reason, _),) = await _reasons(bus)
    assert f"algorithm.filter: {FILTERS}:keeping failed for train.jsonl:3 (ValueError: a reward over 1)" in reason
    assert intake.left["filtered"] == 1
    group, seen = experience.group, pickle.loads((tmp_path / "seen").read_bytes())
    assert seen["rewards"].tolist() == [1.0, 1.0]
    assert seen["lengths"].tolist() == [len(sample.token_ids) for sample in group.samples]
    assert seen["token_ids"].tolist() == [token for sample in group.samples for token in sample.token_ids.tolist()]
    assert len(seen["behavior_logprobs"]) == len(seen["token_ids"])
    assert (seen["texts"], seen["truncated"].dtype) == ([sample.text for sample in group.samples], np.bool_)


async def test_a_filter_that_ends_its_process_costs_its_group_and_the_trainer_continues(bus: Bus) -> None:
    for group_id, rewards in enumerate([(1.0, 0.0), (2.0, 0.0), (0.0, 2.0), (0.0, 1.0), (0.0, 0.0)]):
        experience = builders.experience(group_id, rewards)
        await bus.append(EXPERIENCE, {"id": str(group_id), "data": wire.encode(experience)})
    intake = Intake(bus, Live(bus, filtered("deadly")), {V(0): 0})
    async with filling(intake):
        assert ids(await intake.next_batch(0, wait_s=PATIENCE_S)) == [0, 4]
    assert await bus.counts() == {"dead:experience": 3}
    failed = f"algorithm.filter: {FILTERS}:deadly failed for train.jsonl:"
    correct = "): correct the function, or change algorithm.filter"
    endings = (
        "2 (it ended its process by SIGSEGV",
        "3 (it ended its process by exit code 7",
        "4 (it ended its process by exit code 1",
    )
    for (reason, _), ending in zip(await _reasons(bus), endings, strict=True):
        assert f"{failed}{ending}{correct}" in reason


async def test_a_filter_that_does_not_answer_costs_its_group_and_the_trainer_continues(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_filter, "_ANSWER_S", 0.3)
    for group_id, rewards in enumerate([(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)]):
        experience = builders.experience(group_id, rewards)
        await bus.append(EXPERIENCE, {"id": str(group_id), "data": wire.encode(experience)})
    intake = Intake(bus, Live(bus, filtered("endless")), {V(0): 0})
    async with filling(intake):
        assert ids(await intake.next_batch(0, wait_s=PATIENCE_S)) == [0, 2]
    ((reason, _),) = await _reasons(bus)
    assert f"{FILTERS}:endless failed for train.jsonl:2 (it did not answer within 0.3 s)" in reason


async def test_demonstrations_are_not_filtered(bus: Bus) -> None:
    for group_id in (0, 1, 2):
        await show(bus, group_id)
    await generate(bus, 3, 4, 5)
    intake = Intake(bus, Live(bus, mixing(filter=f"{FILTERS}:keeping_nothing")), {V(0): 0})
    async with filling(intake):
        assert ids(await intake.next_batch(0, wait_s=PATIENCE_S)) == [0, 1, 2]


async def test_a_filter_that_keeps_nothing_is_reported_once_for_a_step(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "MANY_FILTERED", 2)
    for group_id in range(6):
        await put(bus, group_id)
    intake = Intake(bus, Live(bus, filtered("keeping_nothing")), {V(0): 0})
    async with filling(intake):
        await until(lambda: _counted(bus, {"dropped:filtered": 6}))
    (told,) = [event for _, event in await bus.newest(EVENTS, Event, 10)]
    assert (told.name, told.fields) == ("filter keeps little", {"groups": 4})
    assert f"{FILTERS}:keeping_nothing has not kept 4 groups" in told.detail


async def test_where_nothing_has_signal_any_more_groups_are_taken_all_the_same(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "DYNAMIC_SAMPLING_ROUNDS", 1)
    for group_id in range(4):
        experience = builders.experience(group_id, (1.0, 1.0))
        await bus.append(EXPERIENCE, {"id": str(group_id), "data": wire.encode(experience)})
    intake = Intake(bus, Live(bus, dynamic()), {V(0): 0})
    async with filling(intake):
        batch = await intake.next_batch(0, wait_s=PATIENCE_S)
    assert batch is not None
    assert [taken.experience.group.prompt.group_id for taken in batch] == [2, 3]
    assert await bus.counts() == {"dropped:no_signal": 2}


async def _ended_without_a_batch(bus: Bus, intake: Intake, step: int, counts: dict[str, int]) -> bool:
    assert await intake.next_batch(step, wait_s=0.05) is None
    return await bus.counts() == counts


async def _buried(bus: Bus) -> bool:
    return await bus.counts() == {"dead:experience": 1}


@pytest.mark.parametrize("max_lag", [0, 3])
async def test_the_lag_bound_is_that_of_the_settings(bus: Bus, max_lag: int) -> None:
    steps = {V(version): version for version in range(5)}
    for version in range(5):
        await put(bus, version, version)
    await put(bus, 9, 4)
    intake = Intake(bus, Live(bus, settings(max_lag=max_lag)), steps)
    async with filling(intake):
        await until(lambda: len(intake._held) == 6)
        batch = await intake.next_batch(4, wait_s=PATIENCE_S)
    assert batch is not None
    kept = [taken.experience.group.oldest_version for taken in batch]
    assert kept == ([4, 4] if max_lag == 0 else [1, 2])


async def test_a_group_without_the_reference_that_was_promised_is_buried_with_the_setting_to_change(bus: Bus) -> None:
    promised = Settings.model_validate(
        {"algorithm": {"groups_per_step": 1, "reference": "reward", "kl": {"coefficient": 0.1}}}
    )
    whole = np.full(6, -0.5, dtype=np.float32)
    for group_id, logprobs in enumerate([None, whole[:5], whole * np.nan, whole]):
        experience = dataclasses.replace(builders.experience(group_id), reference_logprobs=logprobs)
        await bus.append(EXPERIENCE, {"id": str(group_id), "data": wire.encode(experience)})
    intake = Intake(bus, Live(bus, promised), {V(0): 0})
    async with filling(intake):
        batch = await intake.next_batch(0, wait_s=PATIENCE_S)
        await until(lambda: intake.left["buried"] == 3)
    assert batch is not None
    assert [taken.experience.group.prompt.group_id for taken in batch] == [3]
    dead = await raw(bus).xrange(bus.keys.of(EXPERIENCE.dead))
    reasons = [fields[b"reason"].decode() for _, fields in dead]
    assert reasons[0].startswith('expected reference logprobs with algorithm.reference = "reward", found none')
    assert reasons[1].endswith("expected 6 reference logprobs, found 5")
    assert reasons[2].endswith("reference_logprobs: expected numbers from -1e+06 to 0.1, found nan to nan")
    assert (await bus.counts())["dead:experience"] == 3


async def test_a_step_waits_for_a_group_that_was_admitted_before_those_of_its_batch(bus: Bus) -> None:
    await raw(bus).hset(bus.keys.of(GENERATING), "1", wire.encode(builders.prompt(1)))
    for group_id in (0, 2, 3):
        await put(bus, group_id)
    intake = Intake(bus, Live(bus, settings("wait")), {V(0): 0})
    async with filling(intake):
        await until(lambda: len(intake._held) == 3)
        assert await intake.next_batch(0, wait_s=0.5) is None
        await bus.append(ROLLOUTS, {"id": "1", "data": b"being scored"})  # it is in one of these places at any moment
        await raw(bus).hdel(bus.keys.of(GENERATING), "1")
        assert await intake.next_batch(0, wait_s=0.5) is None
        await put(bus, 1)
        await bus.remove(ROLLOUTS)
        batch = await intake.next_batch(0, wait_s=PATIENCE_S)
    assert batch is not None
    assert [taken.experience.group_id for taken in batch] == [0, 1]


async def test_a_step_waits_no_longer_than_it_may_nor_for_later_groups(bus: Bus) -> None:
    for group_id in (1, 9):
        await raw(bus).hset(bus.keys.of(GENERATING), str(group_id), wire.encode(builders.prompt(group_id)))
    for group_id in (0, 2):
        await put(bus, group_id)
    limited = settings("wait")
    limited = limited.model_copy(update={"internal": limited.internal.model_copy(update={"stale_wait_s": 0.3})})
    intake = Intake(bus, Live(bus, limited), {V(0): 0})
    async with filling(intake):
        batch = await intake.next_batch(0, wait_s=PATIENCE_S)
    assert batch is not None
    assert [taken.experience.group_id for taken in batch] == [0, 2]


@pytest.mark.parametrize(
    ("algorithm", "purpose", "sentence"),
    [
        ({}, Purpose.DEMONSTRATE, 'expected a group to train, with a prompt, with algorithm.loss = "clip", found one to demonstrate'),
        ({"loss": "cross_entropy"}, Purpose.TRAIN, 'expected a group to demonstrate, with a prompt, with algorithm.loss = "cross_entropy"'),
        ({"distillation": 1.0}, Purpose.TRAIN, "expected teacher logprobs of every sample with algorithm.distillation > 0, found none"),
    ],
)  # fmt: skip
async def test_a_group_of_another_kind_or_without_its_teacher_is_buried(
    bus: Bus, algorithm: dict[str, Any], purpose: Purpose, sentence: str
) -> None:
    made = builders.experience(0)
    prompt = dataclasses.replace(made.group.prompt, purpose=purpose)
    group = dataclasses.replace(made, group=dataclasses.replace(made.group, prompt=prompt))
    await bus.append(EXPERIENCE, {"id": "0", "data": wire.encode(group)})
    of = Settings.model_validate({"algorithm": {"groups_per_step": 1, **algorithm}})
    async with filling(Intake(bus, Live(bus, of), {V(0): 0})):
        await until(lambda: bus.length(EXPERIENCE.dead))
    ((_, fields),) = await raw(bus).xrange(bus.keys.of(EXPERIENCE.dead))
    assert sentence in fields[b"reason"].decode()


@pytest.mark.parametrize(
    ("top_k", "largest", "sentence"),
    [
        (0, 0, "expected the teacher's 2 most probable tokens at every position with algorithm.distillation_top_k = 2, found 0"),
        (3, 5, "expected the teacher's 2 most probable tokens at every position with algorithm.distillation_top_k = 2, found 3"),
        (2, 50, "expected token ids below the model's 48, found 50"),
    ],
)  # fmt: skip
async def test_a_group_with_other_most_probable_tokens_than_asked_for_is_buried(
    bus: Bus, top_k: int, largest: int, sentence: str
) -> None:
    made = builders.experience(0)

    def taught(sample: Sample) -> Sample:
        tokens = len(sample.token_ids)
        changed = dataclasses.replace(sample, teacher_logprobs=np.full(tokens, -1.0, np.float32))
        if not top_k:
            return changed
        ids = np.tile(np.arange(largest - top_k + 1, largest + 1, dtype=np.int32), (tokens, 1))
        return dataclasses.replace(
            changed, teacher_top_ids=ids, teacher_top_logprobs=np.full((tokens, top_k), -2.0, np.float32)
        )

    samples = tuple(taught(sample) for sample in made.group.samples)
    group = dataclasses.replace(made, group=dataclasses.replace(made.group, samples=samples))
    await bus.append(EXPERIENCE, {"id": "0", "data": wire.encode(group)})
    algorithm = {"groups_per_step": 1, "distillation": 1.0, "distillation_top_k": 2}
    of = Settings.model_validate({"algorithm": algorithm})
    intake = Intake(bus, Live(bus, of), {V(0): 0})
    intake.vocabulary = 48
    async with filling(intake):
        await until(lambda: bus.length(EXPERIENCE.dead))
    ((_, fields),) = await raw(bus).xrange(bus.keys.of(EXPERIENCE.dead))
    assert sentence in fields[b"reason"].decode()


def mixing(**algorithm: Any) -> Settings:
    data = {"path": {"problems.jsonl": 1, "shown.jsonl": 1}, "curriculum": True}
    return Settings.model_validate(
        {"algorithm": {"groups_per_step": 3, "max_lag": 1, "imitation": 0.1, **algorithm}, "data": data}
    )


async def show(bus: Bus, group_id: int, version: int = 0, rewards: tuple[float, ...] = (0.0,)) -> None:
    made = builders.experience(group_id, rewards, version)
    prompt = dataclasses.replace(made.group.prompt, purpose=Purpose.DEMONSTRATE)
    shown = dataclasses.replace(made, group=dataclasses.replace(made.group, prompt=prompt))
    await bus.append(EXPERIENCE, {"id": str(group_id), "data": wire.encode(shown)})


async def generate(bus: Bus, *group_ids: int) -> None:
    for group_id in group_ids:
        await raw(bus).hset(bus.keys.of(GENERATING), str(group_id), wire.encode(builders.prompt(group_id)))


async def arrive(bus: Bus, group_id: int) -> None:
    await raw(bus).hdel(bus.keys.of(GENERATING), str(group_id))
    await put(bus, group_id)


def ids(batch: list[Taken] | None) -> list[int]:
    assert batch is not None
    return [int(taken.experience.group_id) for taken in batch]


async def test_demonstrations_keep_their_places_and_do_not_overtake_samples(bus: Bus) -> None:
    await generate(bus, 0, 2, 4)
    for group_id in (1, 3, 5):
        await show(bus, group_id)
    intake = Intake(bus, Live(bus, mixing()), {V(0): 0})
    async with filling(intake):
        await until(lambda: len(intake._held) == 3)
        assert await intake.next_batch(0, wait_s=0.5) is None, "a step of demonstrations alone would be another mixture"
        await arrive(bus, 4)
        assert await intake.next_batch(0, wait_s=0.5) is None, "one of three: the other two are samples"
        await arrive(bus, 2)
        batch = await intake.next_batch(0, wait_s=PATIENCE_S)
        assert batch is not None
        assert ids(batch) == [1, 2, 4], "samples overtake samples"
        for taken in batch:
            await bus.drop(taken.delivery, "test")
        intake.release(batch)
        assert await intake.next_batch(1, wait_s=0.5) is None
        await arrive(bus, 0)
        assert ids(await intake.next_batch(1, wait_s=PATIENCE_S)) == [3, 5, 0]


async def test_where_no_sample_comes_before_them_demonstrations_make_a_step(bus: Bus) -> None:
    for group_id in (0, 1, 2):
        await show(bus, group_id)
    await generate(bus, 3, 4, 5)
    intake = Intake(bus, Live(bus, mixing()), {V(0): 0})
    async with filling(intake):
        assert ids(await intake.next_batch(0, wait_s=PATIENCE_S)) == [0, 1, 2]


@pytest.mark.parametrize("on_stale", ["drop", "requeue", "mask", "wait"])
async def test_demonstrations_are_never_stale_nor_without_signal_and_have_no_signals(bus: Bus, on_stale: str) -> None:
    await show(bus, 0, version=0)
    await put(bus, 1, version=9)
    await put(bus, 2, version=9)
    of = mixing(on_stale=on_stale, dynamic_sampling=True)
    intake = Intake(bus, Live(bus, of), {V(0): 0, V(9): 9})
    async with filling(intake):
        batch = await intake.next_batch(9, wait_s=PATIENCE_S)
    assert batch is not None
    assert [(int(taken.experience.group_id), taken.contexts) for taken in batch] == [
        (0, (0,)),
        (1, (0, 0)),
        (2, (0, 0)),
    ]
    change = intake.take_signals(batch)
    assert change is not None
    assert change.groups == [("train.jsonl:2", 0.25), ("train.jsonl:3", 0.25)]
    assert await bus.counts() == {}


async def test_preference_pairs_are_never_stale_nor_dropped_and_a_generated_group_is_refused(bus: Bus) -> None:
    of = Settings.model_validate(
        {"algorithm": {"preset": "dpo", "groups_per_step": 2, "max_lag": 0}, "data": {"rejected_field": "rejected"}}
    )
    await put(bus, 0)
    for group_id in (1, 2):
        await show(bus, group_id, rewards=(1.0, 0.0))
    intake = Intake(bus, Live(bus, of), {V(0): 0})
    async with filling(intake):
        batch = await intake.next_batch(9, wait_s=PATIENCE_S)
    assert batch is not None
    assert [(int(taken.experience.group_id), taken.contexts) for taken in batch] == [(1, (0, 0)), (2, (0, 0))]
    assert intake.take_signals(batch) is None
    assert await bus.counts() == {"dead:experience": 1}
    ((reason, _),) = await _reasons(bus)
    assert 'expected a group to demonstrate, with a prompt, with algorithm.loss = "dpo"' in reason


async def test_a_demonstration_of_a_revoked_version_is_fenced_as_its_place_is_drawn_again(bus: Bus) -> None:
    await raw(bus).execute_command("SADD", bus.keys.named("revoked"), 7)
    for group_id, version in ((0, 7), (1, 0), (2, 0), (3, 0)):
        await show(bus, group_id, version)
    intake = Intake(bus, Live(bus, mixing()), {V(0): 0, V(7): 0})
    async with filling(intake):
        await until(lambda: len(intake._held) == 4)
        assert ids(await intake.next_batch(0, wait_s=PATIENCE_S)) == [1, 2, 3]
    assert await bus.counts() == {"dropped:fenced": 1}


@pytest.mark.parametrize("top_k", [0, 3])
async def test_a_mixed_run_takes_demonstrations_without_a_teacher_or_a_reference(bus: Bus, top_k: int) -> None:
    of = mixing(distillation=1.0, distillation_top_k=top_k, reference="reward", kl={"coefficient": 0.1})
    intake = Intake(bus, Live(bus, of), {V(0): 0})
    await put(bus, 0)
    for group_id in (1, 2, 3):
        await show(bus, group_id)
    async with filling(intake):
        assert ids(await intake.next_batch(0, wait_s=PATIENCE_S)) == [1, 2, 3]
    assert await bus.counts() == {"dead:experience": 1}


@pytest.mark.parametrize(("preset", "kept"), [("grpo", 2), ("ppo", 1)])
async def test_episodes_with_prompts_of_their_own_are_taken_and_a_critic_takes_one_branch_only(
    bus: Bus, preset: str, kept: int
) -> None:
    tree = builders.tree()
    for group_id, segments in enumerate((tree.segments, tree.segments[:4])):
        sample = dataclasses.replace(tree, segments=segments, turn_rewards=np.zeros(0, np.float32))
        made = of_lengths(group_id, 2, 2, rewards=(1.0, 0.0))
        group = dataclasses.replace(made.group, prompt_token_ids=np.zeros(0, np.int32), samples=(sample, sample))
        await send(bus, dataclasses.replace(made, group=group))
    intake = Intake(bus, Live(bus, limited(64, preset=preset)), {V(0): 0})
    async with filling(intake):
        await until(lambda: intake.left["buried"] == 2 - kept and len(intake._held) == kept)


class Slow:
    """A shelf whose payloads are there once ``together`` of them are asked for."""

    def __init__(self, payloads: dict[str, bytes], together: int) -> None:
        self.payloads, self.together = payloads, together
        self.asked = self.most = 0
        self.enough = asyncio.Event()

    def takes(self, size: int) -> bool:
        return False

    async def put(self, payload: bytes, group_id: int, prompt: bytes = b"") -> Claim | None:
        return None

    async def fetch(self, claim: Claim) -> bytes:
        self.asked += 1
        self.most = max(self.most, self.asked)
        if self.asked == self.together:
            self.enough.set()
        await self.enough.wait()
        self.asked -= 1
        if claim.digest not in self.payloads:
            raise ShelfLost("no copy is left")
        return self.payloads[claim.digest]


@pytest.mark.parametrize("again", [False, True])
async def test_payloads_are_fetched_several_at_a_time_and_groups_held_in_their_order(bus: Bus, again: bool) -> None:
    """``again``: by the successor of a trainer that held them."""
    payloads: dict[str, bytes] = {}
    for group_id in range(20):
        payload = wire.encode(builders.experience(group_id))
        digest = hashlib.sha256(payload).hexdigest()
        if group_id != 3:
            payloads[digest] = payload
        claim = Claim(group_id, digest, len(payload), (), wire.encode(builders.prompt(group_id)))
        await bus.append(EXPERIENCE, {"id": str(group_id), "data": wire.encode(claim)})
    if again:
        assert len(await bus.read(EXPERIENCE, Experience, CONSUMER, 20, None)) == 20
    bus.shelf = shelf = Slow(payloads, together=4)
    wide = Settings.model_validate({"algorithm": {"groups_per_step": 10, "max_lag": 1}})
    intake = Intake(bus, Live(bus, wide), {V(0): 0})
    async with filling(intake):
        await until(lambda: len(intake._held) == 19)
    assert list(intake._held) == [group_id for group_id in range(20) if group_id != 3]
    assert 4 <= shelf.most <= 8
    assert await bus.counts() == {"unavailable": 1}, "the lost one is generated again, and no other"


async def test_routes_of_several_groups_are_fetched_at_the_same_time_and_each_group_gets_its_own(bus: Bus) -> None:
    payloads = {f"{group_id:064x}": bytes([group_id]) for group_id in range(20)}
    for group_id, digest in enumerate(payloads):
        made = builders.experience(group_id)
        claim = wire.encode(Claim(group_id, digest, 1, (), b""))
        sample = dataclasses.replace(made.group.samples[0], routes=claim)
        samples = (sample, *made.group.samples[1:])
        await send(bus, dataclasses.replace(made, group=dataclasses.replace(made.group, samples=samples)))
    bus.shelf = shelf = Slow(payloads, together=4)
    of = Settings.model_validate({"algorithm": {"groups_per_step": 10, "max_lag": 1}})
    of = of.model_copy(update={"trainer": of.trainer.model_copy(update={"router_replay": True})})
    intake = Intake(bus, Live(bus, of), {V(0): 0})
    async with filling(intake):
        await until(lambda: len(intake._held) == 20)
    assert {group_id: list(taken.routes.values()) for group_id, taken in intake._held.items()} == {
        group_id: [bytes([group_id])] for group_id in range(20)
    }
    assert 4 <= shelf.most <= 8


async def test_of_groups_that_arrive_together_each_id_is_held_once_and_what_was_trained_leaves(bus: Bus) -> None:
    await raw(bus).execute_command("SETBIT", bus.keys.of(TRAINED), 5, 1)
    for group_id in (5, 6, 6, 7):
        await put(bus, group_id)
    intake = Intake(bus, Live(bus, settings()), {V(0): 0})
    async with filling(intake):
        await until(lambda: (intake.left["duplicate"], list(intake._held)) == (2, [6, 7]))
    assert await bus.counts() == {"dropped:duplicate": 2}


async def test_what_the_bus_knows_about_many_groups_takes_one_round_trip(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, trips = Ledger(bus), 0
    await raw(bus).execute_command("HSET", bus.keys.of(RUN), "cursor", 3, "newest_version", 4)
    await raw(bus).execute_command("SETBIT", bus.keys.of(TRAINED), 1, 1)
    ask_all = bus.ask_all

    async def counted(*words: Any, **options: Any) -> Any:
        nonlocal trips
        trips += 1
        return await ask_all(*words, **options)

    monkeypatch.setattr(bus, "ask_all", counted)
    assert await ledger.standings([0, 1, 2, 3, 1 << 40]) == [
        Standing(admitted=known, trained=trained, newest_version=V(4))
        for known, trained in ((True, False), (True, True), (True, False), (False, False), (False, False))
    ]
    assert trips == 1
