"""Checkpoints keep their place in the ledger when the run's folder or the bus is not what it was."""

from pathlib import Path

from services.trainer.rank0.retention import Retention
from shared.bus.bus import Bus
from shared.bus.messages import PolicyVersion
from tests.conftest import until
from tests.support.coordinator_players import replicas, running, settings
from tests.trainer.checkpoint.test_damage import Played

V = PolicyVersion


async def test_a_run_whose_folder_was_moved_keeps_its_pins(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    run = Played(bus, tmp_path / "before")
    async with running(run.parts), replicas(bus):
        await run.reach(5, every=2)
    await run.ledger.pin(V(2), pinned=True)
    (tmp_path / "before").rename(tmp_path / "after")
    run.settings = settings(tmp_path / "after", steps=50)
    run.root = run.settings.run_folder / "checkpoints"

    resumed = await run.resume()
    assert resumed.checkpoint is not None
    assert resumed.checkpoint.folder == run.folder(4)
    assert await run.ledger.checkpoints() == {V(2): str(run.folder(2)), V(4): str(run.folder(4))}
    retention = Retention(run.settings, bus)
    await retention.note_version(V(6), resumed.checkpoint)
    assert (await run.ledger.checkpoints())[V(6)] == str(run.folder(4))
    assert not await run.ledger.forget_checkpoint(str(run.folder(2))), "it is pinned"


async def test_a_rollback_whose_checkpoint_is_gone_deletes_none_of_those_it_revoked(bus: Bus, tmp_path: Path) -> None:
    run = Played(bus, tmp_path)
    async with running(run.parts), replicas(bus):
        await run.reach(5, every=2)
        run.folder(2).rename(tmp_path / "elsewhere")
        await run.parts.rollbacks.begin(V(2), "")
        assert (await run.resume()).stranded
        await until(lambda: _has_failed(run))
        assert (await run.resume()).stranded, "a trainer that starts again"
        assert run.folder(4).is_dir()
        (tmp_path / "elsewhere").rename(run.folder(2))
        await run.parts.rollbacks.begin(V(2), "put back")
        assert not (await run.resume()).stranded
        assert not run.folder(4).exists()


async def _has_failed(run: Played) -> bool:
    rollback = await run.parts.rollbacks.current()
    return rollback is not None and rollback.strands
