"""A trainer's opening turns bus and folder into commands."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.manifests import CheckpointState
from penstock.services.trainer.rank0.branch import Branch
from penstock.services.trainer.rank0.mailbox.commands import Command, CommandKind
from penstock.services.trainer.rank0.opening import Opening
from penstock.services.trainer.rank0.retention import Retention
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.replicas.cordon import Cordon
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.stores.replicas.place import Place
from penstock.shared.bus.stores.replicas.run_secret import RunSecret
from penstock.shared.errors import SettingsError
from penstock.shared.process.service import Context
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings
from tests.trainer.checkpoint.test_store import written


class Opened:
    def __init__(self, bus: Bus, folder: Path) -> None:
        self.of = Settings.model_validate({"run": {"id": bus.run_id, "folder": folder}})
        self.root = self.of.run_folder / "checkpoints"
        self.ledger = Ledger(bus)
        cordon = Cordon(bus, "trainer-0", lambda: None)
        context = Context(
            self.of, "trainer", "trainer-0", bus, Status(), asyncio.Event(), Live(bus, self.of), cordon, RunSecret(bus)
        )
        self.opening = Opening(context, Place(bus, "trainer-0", 1.0), Branch(bus), Retention(self.of, bus))


async def test_a_new_run_has_no_commands_and_its_epoch_is_taken(bus: Bus, tmp_path: Path) -> None:
    opened = Opened(bus, tmp_path)
    await opened.ledger.create()
    assert await opened.opening.find() == []
    assert (await opened.ledger.status()).trainer_epoch == 1
    assert (opened.opening.loaded, opened.opening.stranded) == (None, False)


async def test_a_checkpoint_is_loaded(bus: Bus, tmp_path: Path) -> None:
    opened = Opened(bus, tmp_path)
    made = written(opened.root, 2)
    assert await opened.opening.find() == [Command(CommandKind.LOAD, folder=str(made.folder))]
    assert opened.opening.loaded == made


async def test_a_run_whose_bus_was_lost_keeps_its_gpu_hours_and_counts_on_from_the_checkpoint(
    bus: Bus, tmp_path: Path
) -> None:
    opened = Opened(bus, tmp_path)
    state = CheckpointState(2, PolicyVersion(2), 8, "", 1, 1, gpu_s=7200.0, gpu_until_s=1_000_000.5)
    local_store.beside(opened.root, 2).mkdir(parents=True)
    local_store.make_whole(opened.root, state)
    await opened.opening.find()
    status = await opened.ledger.status()
    assert (status.gpu_s, status.gpu_until_s) == (7200.0, 1_000_000.5)
    described = await Retention(opened.of, bus).describe(2, PolicyVersion(2), Live(bus, opened.of))
    assert (described.gpu_s, described.gpu_until_s) == (7200.0, 1_000_000.5)


async def test_pins_and_releases_of_a_run_whose_bus_was_lost_are_kept(bus: Bus, tmp_path: Path) -> None:
    opened, v1 = Opened(bus, tmp_path), PolicyVersion(1)
    for step, pins in ((1, []), (2, [v1])):
        state = CheckpointState(step, PolicyVersion(step), 8, "", 1, 1, pins=pins, released=pins)
        local_store.beside(opened.root, step).mkdir(parents=True)
        local_store.make_whole(opened.root, state)
    await opened.opening.find()
    assert (await opened.ledger.pins(), await opened.ledger.released()) == (frozenset({v1}), frozenset({v1}))
    assert not await opened.ledger.forget_checkpoint(str(opened.root / "step-000001"))
    described = await Retention(opened.of, bus).describe(2, PolicyVersion(2), Live(bus, opened.of))
    assert (described.pins, described.released) == ([v1], [v1])


async def test_damage_that_leaves_nothing_to_continue_from_pauses_the_run_and_is_raised(
    bus: Bus, tmp_path: Path
) -> None:
    opened = Opened(bus, tmp_path)
    made = written(opened.root, 2)
    (made.folder / "state.json").write_text("{")
    await opened.ledger.create()
    await opened.ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    with pytest.raises(SettingsError, match="the run cannot continue: no checkpoint is intact"):
        await opened.opening.find()
    assert "no checkpoint is intact" in (await opened.ledger.status()).reason


def test_the_driver_can_look_for_a_checkpoint_before_torch_is_imported() -> None:
    program = "import penstock.services.trainer.service, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
