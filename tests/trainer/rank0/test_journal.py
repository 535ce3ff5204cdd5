"""A commit includes what a replay needs of the step."""

import numpy as np
import pytest

from penstock.services.trainer.rank0.mailbox.commands import Command, CommandKind, _read, _write
from penstock.shared.bus.bus import Bus, Delivery
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, Misfit, PolicyVersion, StepPlan
from penstock.shared.bus.stores.experience.signals import SignalChange, read_signals, signal
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.streams import EXPERIENCE, JOURNAL
from penstock.shared.errors import Fenced
from tests.support import builders
from tests.support.coordinator_players import record, report

PLAN = StepPlan(4096, "0f" * 16, (Misfit(1, (0, 3)), Misfit(4, (2,))))


async def taken(bus: Bus, *group_ids: int) -> list[Delivery[Experience]]:
    for group_id in group_ids:
        data = wire.encode(builders.experience(group_id))
        await bus.append(EXPERIENCE, {"id": str(group_id), "data": data})
    return await bus.read(EXPERIENCE, Experience, "trainer", len(group_ids), block_s=1.0)


async def test_the_plan_of_a_step_is_committed_with_its_groups_or_not_at_all(bus: Bus) -> None:
    ledger = Ledger(bus)
    epoch = await ledger.take_epoch()
    await ledger.commit(epoch, record(0, None, 0), [], None)
    batch = await taken(bus, 0, 1)
    with pytest.raises(Fenced):
        await ledger.commit(epoch - 1, record(1, 0, 1), batch, report(1, 1), PLAN)
    assert await ledger.journal("") == []
    await ledger.commit(epoch, record(1, 0, 1), batch, report(1, 1), PLAN)
    first, second = await ledger.journal("")
    assert (first.step, first.plan) == (1, PLAN)
    assert (second.step, second.plan) == (1, None), "once a step"
    assert [wire.decode(entry.data, Experience).group.prompt.group_id for entry in (first, second)] == [0, 1]


async def test_signals_change_with_their_step_or_not_at_all(bus: Bus) -> None:
    ledger = Ledger(bus)
    epoch = await ledger.take_epoch()
    await ledger.commit(epoch, record(0, None, 0), [], None, change=SignalChange(whole={}))
    batch = await taken(bus, 0)
    change = SignalChange([("a:1", 0.0), ("b:2", 0.1875), ("a:1", 0.25)])
    with pytest.raises(Fenced):
        await ledger.commit(epoch - 1, record(1, 0, 1), batch, report(1, 1), PLAN, change)
    assert await read_signals(bus) == {}
    await ledger.commit(epoch, record(1, 0, 1), batch, report(1, 1), PLAN, change)
    assert await read_signals(bus) == {"a:1": "0.125", "b:2": "0.1875"}
    whole = {"c:3": "0.10000000000000001", 'quo"te:4': "0.25"}
    await ledger.commit(epoch, record(2, 1, 1), [], None, change=SignalChange(whole=whole))
    assert await read_signals(bus) == whole
    await ledger.commit(epoch, record(3, 2, 1), [], None)
    assert await read_signals(bus) == whole


def test_a_groups_signal_is_the_variance_of_its_rewards_up_to_a_quarter() -> None:
    rewards = ((1, 0, 0, 0), (1, 1, 1, 1), (3, -3), (0.5, 0.25))
    assert [signal(np.array(group, dtype=np.float32)) for group in rewards] == [0.1875, 0.0, 0.25, 0.015625]


async def test_a_journal_of_an_older_version_is_read_without_plans(bus: Bus) -> None:
    data = wire.encode(builders.experience(0))
    await bus.append(JOURNAL, {"id": "0", "step": "1", "data": data})
    (entry,) = await Ledger(bus).journal("")
    assert (entry.step, entry.settings_revision, entry.plan) == (1, 0, None)


@pytest.mark.parametrize("plan", [None, PLAN])
def test_every_rank_gets_the_plan_with_the_order_to_replay(plan: StepPlan | None) -> None:
    experience = builders.experience(3)
    order = Command(
        CommandKind.REPLAY,
        "",
        (wire.encode(experience),),
        (experience,),
        {PolicyVersion(7): 1},
        1e-3,
        plan,
        contexts=(2, 0),
    )
    read = _read(memoryview(_write(order)))
    assert (read.kind, read.lags, read.learning_rate, read.plan) == (CommandKind.REPLAY, {7: 1}, 1e-3, plan)
    assert read.contexts == (2, 0)
    assert read.groups[0].group.prompt.group_id == 3


async def test_the_newest_entry_is_known_after_it_was_trimmed_and_none_is_on_an_emptied_server(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(bus)
    assert await ledger.last_journal_entry() == ""
    entry = await bus.append(JOURNAL, {"id": "0", "step": "1", "data": wire.encode(builders.experience(0))})
    await ledger.trim_journal(entry)
    assert await ledger.journal("") == []
    assert await ledger.last_journal_entry() == entry
    ask = bus.ask

    async def emptied_before(command: str, *words: object) -> object:
        """The server loses its data between the first look and any command after it."""
        answer = await ask(command, *words)  # type: ignore[arg-type]
        await ask("DEL", JOURNAL)
        return answer

    monkeypatch.setattr(bus, "ask", emptied_before)
    assert await ledger.last_journal_entry() == entry
    assert await ledger.last_journal_entry() == ""
