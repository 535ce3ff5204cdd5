"""Laws of a trainer's opening: the search for where to continue begins before any model is loaded, and its end becomes orders.

The bus is a real Valkey, checkpoints are real folders; no model is loaded.
"""

import asyncio
from pathlib import Path

import pytest

from services.trainer.rank0.branch import Branch
from services.trainer.rank0.commands import Command, CommandKind
from services.trainer.rank0.opening import Opening
from services.trainer.rank0.retention import Retention
from shared.bus.bus import Bus
from shared.bus.stores.cordon import Cordon
from shared.bus.stores.ledger import Ledger, RunState
from shared.bus.stores.live_settings import Live
from shared.bus.stores.run_secret import RunSecret
from shared.errors import SettingsError
from shared.process.service import Context
from shared.process.telemetry import Status
from shared.settings import Settings
from tests.conftest import until
from tests.support.raw_redis import raw
from tests.trainer.checkpoint.test_store import written


class Opened:
    """An opening of the run on ``bus``, as rank 0's training thread has it."""

    def __init__(self, bus: Bus, folder: Path) -> None:
        self.of = Settings.model_validate({"run": {"id": bus.run_id, "folder": folder}})
        self.root = self.of.run_folder / "checkpoints"
        self.ledger, self.stop, loop = Ledger(bus), asyncio.Event(), asyncio.get_running_loop()
        cordon = Cordon(bus, "trainer-0", lambda: None)
        context = Context(
            self.of, "trainer", "trainer-0", bus, Status(), self.stop, Live(bus, self.of), cordon, RunSecret(bus)
        )
        retention = Retention(self.of, bus, lambda work: asyncio.run_coroutine_threadsafe(work, loop).result())
        self.opening = Opening(context, Branch(bus), retention, loop)

    async def next_order(self) -> Command | None:
        """Return the next order that is not to wait."""
        order = await asyncio.to_thread(self.opening.next_order)
        while order is not None and order.kind is CommandKind.WAIT:
            order = await asyncio.to_thread(self.opening.next_order)
        return order


async def test_a_new_run_has_no_orders_and_its_epoch_is_taken_before_the_first_is_asked_for(
    bus: Bus, tmp_path: Path
) -> None:
    opened = Opened(bus, tmp_path)
    await opened.ledger.create()
    opened.opening.begin()

    async def is_taken() -> bool:
        return (await opened.ledger.status()).trainer_epoch == 1

    await until(is_taken)
    assert await opened.next_order() is None
    assert await opened.next_order() is None
    assert (await opened.ledger.status()).trainer_epoch == 1, "begun once"
    assert (opened.opening.loaded, opened.opening.stranded) == (None, False)


async def test_what_begin_found_is_loaded_and_without_begin_the_first_order_finds_it_too(
    bus: Bus, tmp_path: Path
) -> None:
    for begins in (True, False):
        opened = Opened(bus, tmp_path)
        made = written(opened.root, 2)
        if begins:
            opened.opening.begin()
        order = await opened.next_order()
        assert order is not None
        assert (order.kind, order.folder) == (CommandKind.LOAD, str(made.folder))
        assert opened.opening.loaded == made
        assert await opened.next_order() is None


async def test_damage_that_leaves_nothing_to_continue_from_pauses_the_run_before_an_order_is_asked_for_and_is_raised_then(
    bus: Bus, tmp_path: Path
) -> None:
    opened = Opened(bus, tmp_path)
    made = written(opened.root, 2)
    (made.folder / "state.json").write_text("{")
    await opened.ledger.create()
    await opened.ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    opened.opening.begin()

    async def is_paused() -> bool:
        return "no checkpoint is intact" in (await opened.ledger.status()).reason

    await until(is_paused)
    with pytest.raises(SettingsError, match="the run cannot continue: no checkpoint is intact"):
        await opened.next_order()


async def test_a_trainer_that_is_told_to_stop_while_it_looks_stops(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, may_end = Opened(bus, tmp_path), asyncio.Event()
    take_epoch = Branch.take_epoch

    async def held(self: Branch) -> None:
        await may_end.wait()
        await take_epoch(self)

    monkeypatch.setattr(Branch, "take_epoch", held)
    await opened.ledger.create()
    opened.opening.begin()
    order = await asyncio.to_thread(opened.opening.next_order)
    assert order == Command(CommandKind.WAIT)
    opened.stop.set()
    order = await asyncio.to_thread(opened.opening.next_order)
    assert order == Command(CommandKind.STOP)
    may_end.set()
    assert await opened.next_order() is None


async def test_a_rollback_makes_the_opening_look_again(bus: Bus, tmp_path: Path) -> None:
    opened = Opened(bus, tmp_path)
    await opened.ledger.create()
    opened.opening.begin()
    assert await opened.next_order() is None
    epoch = await opened.ledger.take_epoch()  # as a rollback does
    await raw(bus).execute_command("HSET", bus.keys.named("run"), "rollback_epoch", epoch)
    made = written(opened.root, 2)
    order = await opened.next_order()
    assert order is not None
    assert (order.kind, order.folder) == (CommandKind.LOAD, str(made.folder))
    assert (await opened.ledger.status()).trainer_epoch == epoch + 1
