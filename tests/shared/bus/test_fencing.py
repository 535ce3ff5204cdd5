"""Laws of hand-overs that may happen once: an old trainer commits nothing, a version follows its parent, a stale group goes back once."""

import pytest

from penstock.shared.bus.bus import Bus, Delivery
from penstock.shared.bus.messages import Experience, Prompt, RolloutGroup
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.streams import EXPERIENCE, PROMPTS, ROLLOUTS
from penstock.shared.errors import Fenced
from tests.support import builders
from tests.support.coordinator_players import record, report


async def taken_by_the_trainer(bus: Bus) -> tuple[Ledger, list[Delivery[Experience]]]:
    ledger = Ledger(bus)
    await ledger.commit(await ledger.take_epoch(), record(0, None, 0), [], None)
    await bus.publish(ROLLOUTS, builders.group(0), "0")
    (delivery,) = await bus.read(ROLLOUTS, RolloutGroup, "reward-0", 1, None)
    assert await bus.hand_over(delivery, EXPERIENCE, builders.experience(0))
    return ledger, await bus.read(EXPERIENCE, Experience, "trainer", 1, None)


async def test_a_trainer_that_another_followed_commits_nothing(bus: Bus) -> None:
    ledger, batch = await taken_by_the_trainer(bus)
    epoch = await ledger.take_epoch()
    with pytest.raises(Fenced, match="fenced"):
        await ledger.commit(epoch - 1, record(1, 0, 1), batch, report(1, 1))
    assert (await ledger.status()).step == 0
    assert await ledger.journal("") == []
    await ledger.commit(epoch, record(1, 0, 1), batch, report(1, 1))
    assert (await ledger.status()).step == 1


@pytest.mark.parametrize(("version", "parent"), [(2, 0), (1, None), (2, 1)])
async def test_a_version_has_the_next_number_and_the_newest_as_its_parent(
    bus: Bus, version: int, parent: int | None
) -> None:
    ledger, batch = await taken_by_the_trainer(bus)
    epoch = (await ledger.status()).trainer_epoch
    with pytest.raises(Fenced, match="diverged:0"):
        await ledger.commit(epoch, record(version, parent, 1), batch, report(1, version))
    assert (await ledger.status()).newest_version == 0
    await ledger.commit(epoch, record(1, 0, 1), batch, report(1, 1))


async def test_a_group_goes_back_to_generation_once(bus: Bus) -> None:
    _, (stale,) = await taken_by_the_trainer(bus)
    prompt = builders.prompt(0, samples=2)
    assert await bus.requeue(stale, prompt)
    assert not await bus.requeue(stale, prompt)
    assert (await bus.counts())["requeued"] == 1
    assert len(await bus.read(PROMPTS, Prompt, "rollout-0", 10, None)) == 2
