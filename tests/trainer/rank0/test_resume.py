"""Checkpoints keep their place in the ledger when the run's folder or the bus is not what it was."""

import shutil
import time
from pathlib import Path

import pytest

from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.commits import note_committed, read_commits
from penstock.services.trainer.checkpoint.remote_store import CheckpointStore
from penstock.services.trainer.checkpoint.s3 import ObjectStore
from penstock.services.trainer.rank0.resume import may_load
from penstock.services.trainer.rank0.retention import Retention
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.streams import JOURNAL
from tests.conftest import until
from tests.support.coordinator_players import Trainer, replicas, running, settings
from tests.support.object_storage import Storage
from tests.support.raw_redis import empty, raw
from tests.trainer.checkpoint.test_damage import MODEL, Played, _is_running, flip
from tests.trainer.checkpoint.test_store import written
from tests.trainer.test_rollback import _load_and_publish

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


@pytest.mark.parametrize("place", ["folder", "store"])
@pytest.mark.parametrize("knows", ["an older checkpoint", "one that retention has deleted"])
async def test_a_bus_older_than_the_newest_intact_checkpoint_is_restored_from_it(
    bus: Bus, tmp_path: Path, storage: Storage, knows: str, place: str
) -> None:
    run, store = Played(bus, tmp_path), CheckpointStore(ObjectStore(storage.settings(), f"ahead-{tmp_path.name}"))
    async with running(run.parts), replicas(bus):
        await run.reach(5, every=4)
    before = await run.ledger.status()
    for step, version in ((6, 8), (7, 9)):
        store.put(written(run.root, step, version=version, cursor=before.cursor + 6))
    if knows != "an older checkpoint":
        local_store.delete(local_store.read(run.folder(4)))  # type: ignore[arg-type]
    if place == "store":
        shutil.rmtree(run.root, ignore_errors=True)
    else:
        flip(run.folder(7) / MODEL)
    for version, step in ((8, 6), (9, 7), (10, 8)):
        note_committed(run.settings.run_folder, V(version), step, 2)
    resumed = await run.resume(store)
    newest = 7 if place == "store" else 6
    assert resumed.checkpoint is not None
    assert (resumed.checkpoint.state.step, resumed.restored, resumed.journal) == (newest, True, ())
    status, counts = await run.ledger.account()
    assert (status.step, status.cursor) == (newest, before.cursor + 6)
    assert status.newest_version is not None
    assert status.newest_version >= 10, "no number is used again"
    assert status.rewound.steps == 8 - newest
    assert sum(counts.values()) == status.cursor, "what was in flight is counted as lost"
    assert await run.ledger.in_flight() == 0
    assert [key async for key in raw(bus).scan_iter(f"{bus.keys.named('assembly')}:*")] == []


async def test_steps_that_the_bus_lost_are_counted_once_however_often_the_trainer_starts(
    bus: Bus, tmp_path: Path
) -> None:
    run = Played(bus, tmp_path)
    async with running(run.parts), replicas(bus):
        await run.reach(5, every=2)
        folder = run.settings.run_folder
        for version, step, groups in ((5, 5, 2), (6, 6, 2), (7, 6, 0), (8, 7, 3)):
            note_committed(folder, V(version), step, groups)
        with (folder / "commits").open("a") as file:
            file.write("\n9 8")  # a process that died within the line
        resumed, again = await run.resume(), await run.resume()
        rewound = again.status.rewound
        assert (rewound.steps, rewound.groups, again.status.newest_version) == (2, 5, 8)
        assert resumed.checkpoint is not None
        assert resumed.checkpoint.folder == run.folder(4)
        (told,) = await run.events("bus lost steps")
        assert told.startswith("the bus came back with older data, without steps 6 to 7")
        note_committed(folder, V(10), 6, 2)
        await empty(bus)
        assert (await run.resume()).status.rewound.steps == 4, (
            "steps 5 and 6, which the checkpoint of step 4 does not hold"
        )
    assert read_commits(folder).kept == ()


async def test_after_a_lost_bus_the_run_can_be_rolled_back_to_every_checkpoint(bus: Bus, tmp_path: Path) -> None:
    run = Played(bus, tmp_path)
    for step, version in ((2, 2), (4, 5), (6, 8)):
        written(run.root, step, version=version)
    flip(run.folder(6) / MODEL)
    resumed = await run.resume()
    assert resumed.checkpoint is not None
    assert (resumed.checkpoint.state.version, resumed.status.tip) == (5, 5)
    assert [(record.version, record.parent, record.step) for record in await run.ledger.policies()] == [
        (2, None, 2), (5, 2, 4),
    ]  # fmt: skip
    async with running(run.parts), replicas(bus):
        newest = (await _load_and_publish(bus)).version
        await until(lambda: _is_running(run.ledger))
        await run.parts.rollbacks.begin(V(2), "")
        assert await run.ledger.revoked() == {5, newest}
        again = await run.resume()
        assert again.checkpoint is not None
        assert (again.checkpoint.state.version, again.stranded, again.status.step) == (2, False, 2)


async def test_after_a_lost_bus_a_damaged_checkpoint_takes_the_run_back_to_the_one_before(
    bus: Bus, tmp_path: Path
) -> None:
    run = Played(bus, tmp_path)
    for step in (2, 4):
        written(run.root, step)
    await run.resume()
    async with running(run.parts), replicas(bus):
        await _load_and_publish(bus)
        await until(lambda: _is_running(run.ledger))
        flip(run.folder(4) / MODEL)
        resumed = await run.resume()
    assert resumed.checkpoint is not None
    assert (resumed.checkpoint.state.step, resumed.went_back) == (2, True)


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_pin_is_kept_by_the_number_in_its_checkpoint_which_a_restored_bus_knows_it_by(
    bus: Bus, tmp_path: Path, is_stored: bool
) -> None:
    run = Played(bus, tmp_path)
    made = written(run.root, 2)
    place = f"s3://runs/r/checkpoints/step-000002-v000002-{'0f' * 8}" if is_stored else str(made.folder)
    for version in (V(2), V(6)):
        await run.ledger.set_checkpoint(version, place)  # version 6 has the weights of version 2
    await run.ledger.pin(V(6), pinned=True)
    await run.ledger.release(V(6), released=True)
    state = await Retention(run.settings, bus).describe(2, V(6), Live(bus, run.settings))
    assert (state.pins, state.released) == ([2], [2])


async def test_stored_checkpoints_of_a_revoked_branch_are_deleted_before_the_bus_can_be_lost(
    bus: Bus, tmp_path: Path, storage: Storage
) -> None:
    run, store = Played(bus, tmp_path), CheckpointStore(ObjectStore(storage.settings(), f"revoked-{tmp_path.name}"))
    async with running(run.parts), replicas(bus):
        await run.reach(5, every=2)
        kept, left = [store.put(made)[0] for made in local_store.find(run.root)]
        await run.ledger.set_checkpoint(V(4), left.uri)
        await run.parts.rollbacks.begin(V(2), "")
        resumed = await run.resume(store)
    assert resumed.checkpoint is not None
    assert resumed.checkpoint.state.version == 2
    assert [stored.name for stored in store.whole()] == [kept.name]
    assert list(await run.ledger.checkpoints()) == [2]
    await empty(bus)
    again = await run.resume(store)
    assert again.checkpoint is not None
    assert (again.checkpoint.state.version, again.restored) == (2, True)


async def test_the_journal_of_a_new_bus_whose_clock_is_behind_continues_the_checkpoint(
    bus: Bus, tmp_path: Path
) -> None:
    run, ahead = Played(bus, tmp_path), f"{int(time.time() * 1000) + 3_600_000}-7"  # the lost server's clock
    written(run.root, 2, journal_entry=ahead)
    await run.resume()
    async with running(run.parts), replicas(bus):
        await _load_and_publish(bus)
        await (await Trainer(bus).start()).step()
        resumed = await run.resume()
    assert [[entry.step for entry in entries] for entries in resumed.journal] == [[3, 3]]
    assert not resumed.went_back


@pytest.mark.parametrize("entry", ["", "0-0", "5-1"])
async def test_a_journal_that_is_further_than_the_checkpoint_is_left_as_it_is(bus: Bus, entry: str) -> None:
    ledger = Ledger(bus)
    await raw(bus).xadd(bus.keys.of(JOURNAL), {"id": "0", "step": "1", "data": b""}, id="9-0")
    assert await ledger.restore(2, 8, 8, V(2), {}, (0.0, 0.0), V(2), entry)
    assert [entry.entry for entry in await ledger.journal("")] == ["9-0"]


@pytest.mark.parametrize("is_stored", [False, True])
async def test_loads_are_counted_for_a_target_that_shares_its_checkpoint_with_an_earlier_version(
    bus: Bus, tmp_path: Path, is_stored: bool
) -> None:
    run = Played(bus, tmp_path)
    async with running(run.parts), replicas(bus):
        await run.reach(3, every=2)
        (made,) = local_store.find(run.root)
        again = await _load_and_publish(bus)  # a trainer that started: version 4 has the weights of version 3
        place = f"s3://runs/r/checkpoints/step-000002-v000002-{'0f' * 8}" if is_stored else str(made.folder)
        await run.ledger.set_checkpoint(again.version, place)
        await _load_and_publish(bus)
        await run.parts.rollbacks.begin(again.version, "")
        assert [await may_load(bus, made) for _ in range(4)] == [True, True, True, False]
