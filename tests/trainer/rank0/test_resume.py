"""Checkpoints keep their place in the ledger when the run's folder or the bus is not what it was."""

from pathlib import Path

import pytest

from services.trainer.checkpoint import local_store
from services.trainer.checkpoint.remote_store import CheckpointStore
from services.trainer.checkpoint.s3 import ObjectStore
from services.trainer.rank0.branch import note_committed
from services.trainer.rank0.retention import Retention
from shared.bus.bus import Bus
from shared.bus.messages import PolicyVersion
from shared.errors import SettingsError
from tests.conftest import until
from tests.support.coordinator_players import replicas, running, settings
from tests.support.object_storage import Storage
from tests.trainer.checkpoint.test_damage import Played
from tests.trainer.checkpoint.test_store import written

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


async def test_a_checkpoint_of_versions_that_the_bus_lost_is_set_aside_and_not_loaded(
    bus: Bus, tmp_path: Path, storage: Storage
) -> None:
    run, store = Played(bus, tmp_path), CheckpointStore(ObjectStore(storage.settings(), f"lost-{tmp_path.name}"))
    async with running(run.parts), replicas(bus):
        await run.reach(5, every=2)
        lost = [written(run.root, 5, version=8), written(run.root, 6, version=9)]
        stored = [store.put(made)[0] for made in (*lost, *local_store.find(run.root)[:2])]
        note_committed(run.settings.run_folder, V(10))  # what a bus with older data does not know
        resumed = await run.resume(store)
    assert resumed.checkpoint is not None
    assert resumed.checkpoint.folder == run.folder(4)
    assert [entries[0].step for entries in resumed.journal] == [5]
    assert resumed.status.newest_version == 10
    assert sorted(folder.name for folder in run.root.iterdir()) == [
        "lost-step-000005", "lost-step-000006", "step-000002", "step-000004",
    ]  # fmt: skip
    assert {left.name for left in store.whole()} == {left.name for left in stored[2:]}
    (told,) = await run.events("checkpoints set aside")
    assert all(place in told for place in (str(run.root / "lost-step-000005"), stored[0].uri, stored[1].uri))


async def test_a_checkpoint_of_lost_versions_stays_where_the_run_cannot_continue_without_it(
    bus: Bus, tmp_path: Path
) -> None:
    run = Played(bus, tmp_path)
    async with running(run.parts), replicas(bus):
        await run.reach(3, every=2)
        (old,) = local_store.find(run.root)
        await run.ledger.forget_checkpoint(str(old.folder))  # as for a newer checkpoint
        local_store.delete(old)
        written(run.root, 4, version=8)
        note_committed(run.settings.run_folder, V(8))
        with pytest.raises(SettingsError, match="the run cannot continue"):
            await run.resume()
    assert run.folder(4).is_dir()
