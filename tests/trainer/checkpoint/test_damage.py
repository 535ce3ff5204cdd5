"""Damaged checkpoints are found before loading, and the run continues from the newest intact one. Only the last test
has a real trainer.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.manifests import CheckpointFile, CheckpointState
from penstock.services.trainer.checkpoint.remote_store import CheckpointStore
from penstock.services.trainer.checkpoint.s3 import ObjectStore
from penstock.services.trainer.rank0.resume import ResumePoint, find_resume
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Event, PolicyVersion
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings
from tests.conftest import Server, until
from tests.support.coordinator_players import Trainer, make, replicas, running, settings
from tests.support.object_storage import Storage
from tests.support.raw_redis import raw
from tests.trainer.checkpoint.test_store import written
from tests.trainer.test_rollback import _folder, _has_checkpoint, _load_and_publish, _newest_is, replica
from tests.trainer.test_service import GROUPS, Run, bus_of, feed

V = PolicyVersion
MODEL = "engine/engine/mp_rank_00_model_states.pt"
OPTIMIZER = "engine/engine/zero_pp_rank_0_mp_rank_00_optim_states.pt"


async def _is_trimmed(bus: Bus) -> bool:
    return await bus.length(streams.JOURNAL) == 0


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    (MODEL, truncate, f"{MODEL} has 49 bytes instead of 54"),
    (MODEL, flip, f"the content of {MODEL} has changed"),
    (OPTIMIZER, Path.unlink, f"{OPTIMIZER} is missing"),
    (OPTIMIZER, empty, f"{OPTIMIZER} has 0 bytes instead of 69"),
    ("state.json", truncate, "state.json has changed"),
    ("state.json", flip, "state.json has changed"),
    ("state.json", Path.unlink, "state.json is missing"),
]
IDS = [f"{Path(name).name}-{how.__name__}" for name, how, _ in DAMAGES]


@pytest.mark.parametrize(("name", "how", "reason"), DAMAGES, ids=IDS)
def test_each_damage_is_found_and_said_by_name(
    tmp_path: Path, name: str, how: Callable[[Path], None], reason: str
) -> None:
    made = written(tmp_path, 4)
    assert local_store.damage(made.folder) == ""
    how(made.folder / name)
    assert local_store.damage(made.folder) == reason


def test_a_bit_flipped_at_any_place_of_the_marker_is_found(tmp_path: Path) -> None:
    made = written(tmp_path, 4)
    marker = made.folder / "state.json"
    whole = marker.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        marker.write_bytes(bytes(changed))
        checkpoint = local_store.read(made.folder)
        assert checkpoint is None or checkpoint == made, f"{place}: {whole[place : place + 1]!r}"


def test_a_folder_that_is_gone_and_a_file_that_was_added_are_told_apart(tmp_path: Path) -> None:
    made = written(tmp_path, 4)
    (made.folder / "a note of mine").write_text("…")
    assert local_store.damage(made.folder) == ""
    assert local_store.damage(tmp_path / "step-000008") == "the folder is missing"


def test_a_checkpoint_without_digests_is_refused(tmp_path: Path) -> None:
    marker = written(tmp_path, 4).folder / "state.json"
    raw = json.loads(marker.read_text())
    marker.write_text(json.dumps({name: value for name, value in raw.items() if name not in ("files", "sha256")}))
    assert local_store.damage(marker.parent) == "state.json has changed"
    assert local_store.find(tmp_path) == []


def test_a_digest_is_of_the_digests_of_parts_and_the_last_may_be_shorter(tmp_path: Path) -> None:
    path, content = tmp_path / "a.pt", bytes(range(250))
    path.write_bytes(content)
    parts = b"".join(hashlib.sha256(content[place : place + 100]).digest() for place in (0, 100, 200))
    assert local_store.digest(path, 100).sha256 == hashlib.sha256(parts).hexdigest()
    made = local_store.digest(path, 100)
    for place in range(250):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert not local_store.is_intact(path, made)
    path.write_bytes(b"")
    assert local_store.digest(path).sha256 == hashlib.sha256(b"").hexdigest()


def test_what_a_killed_trainer_left_half_written_is_no_part_of_the_next_checkpoint(tmp_path: Path) -> None:
    left = local_store.beside(tmp_path, 4) / "engine" / "zero_pp_rank_7_mp_rank_00_optim_states.pt"
    left.parent.mkdir(parents=True)
    left.write_text("of eight ranks")
    local_store.clear_unfinished(tmp_path)
    assert [file.name for file in written(tmp_path, 4).files] == [MODEL, OPTIMIZER]


class Played:
    """Two groups a step with a fake trainer, dead at ``step``."""

    def __init__(self, bus: Bus, folder: Path) -> None:
        self.bus, self.ledger = bus, Ledger(bus)
        self.settings: Settings = settings(folder, steps=50)
        self.root = self.settings.run_folder / "checkpoints"
        self.parts = make(bus, self.settings)

    async def reach(self, step: int, every: int, *, journal_from: int | None = None) -> None:
        """Commit steps, with a checkpoint every ``every`` that trims the journal (``journal_from``: only that one)."""
        trainer = await Trainer(self.bus).start()
        for _ in range(step):
            made = await trainer.step()
            if made % every:
                continue
            entry = (await raw(self.bus).xinfo_stream(self.bus.keys.of(streams.JOURNAL)))["last-generated-id"].decode()
            await self.ledger.set_checkpoint(V(made), str(written(self.root, made, journal_entry=entry).folder))
            if journal_from is None or made == journal_from:
                await self.ledger.trim_journal(entry)
        await until(lambda: self._head_is(step))

    async def _head_is(self, version: int) -> bool:
        return (await self.ledger.status()).head == version

    async def resume(self, store: CheckpointStore | None = None) -> ResumePoint:
        return await find_resume(self.bus, self.ledger, Live(self.bus, self.settings), self.settings, store)

    def folder(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    async def events(self, name: str) -> list[str]:
        rows = await raw(self.bus).xrange(self.bus.keys.of(streams.EVENTS))
        decoded = [wire.decode(fields[b"data"], Event) for _, fields in rows]
        return [event.detail for event in decoded if event.name == name]


@pytest.mark.parametrize("how", ["flip", "no marker", "no folder"])
async def test_a_damaged_newest_checkpoint_takes_the_run_back_to_the_one_before_and_says_what_is_trained_again(
    bus: Bus, tmp_path: Path, how: str
) -> None:
    run = Played(bus, tmp_path)
    async with running(run.parts), replicas(bus), replica(bus, 5) as serving:
        await run.reach(5, every=2)
        newest = run.folder(4)
        if how == "flip":
            flip(newest / MODEL)
        elif how == "no marker":
            (newest / "state.json").unlink()
        else:
            newest.rename(tmp_path / "elsewhere")

        resumed = await run.resume()
        assert resumed.checkpoint is not None
        assert (resumed.checkpoint.state.step, resumed.journal, resumed.went_back) == (2, (), True)
        status = await run.ledger.status()
        assert (status.state, status.step, status.tip) == (RunState.PAUSED, 2, 2)
        assert await run.ledger.revoked() == {3, 4, 5}
        counts = await bus.counts()
        assert (counts["trained"], counts["undone"]) == (2 * 2, 3 * 2)
        (told,) = await run.events("checkpoint damaged")
        assert told.startswith("the checkpoint of step 4 is damaged (")
        assert str(newest) in told
        assert told.endswith("continuing from the checkpoint of step 2: steps 3 to 5 are trained again")
        assert not newest.exists()
        assert (run.root / "damaged-step-000004").is_dir() == (how != "no folder")
        assert await run.ledger.checkpoints() == {2: str(run.folder(2))}

        await _load_and_publish(bus)
        serving.version = V(6)
        await until(lambda: _is_running(run.ledger))
        reason = (await run.ledger.status()).reason
        assert reason.startswith("rolled back to version 2, as version 6: the checkpoint of step 4 is damaged (")
        assert reason.endswith(": steps 3 to 5 are trained again")


async def _is_running(ledger: Ledger) -> bool:
    return (await ledger.status()).state is RunState.RUNNING


async def test_where_the_journal_reaches_back_to_the_one_before_nothing_is_lost(bus: Bus, tmp_path: Path) -> None:
    run = Played(bus, tmp_path)
    async with running(run.parts), replicas(bus):
        await run.reach(5, every=2, journal_from=2)
        truncate(run.folder(4) / OPTIMIZER)
        resumed = await run.resume()
        assert resumed.checkpoint is not None
        assert (resumed.checkpoint.state.step, resumed.went_back) == (2, False)
        assert [entries[0].step for entries in resumed.journal] == [3, 4, 5]
        status = await run.ledger.status()
        assert (status.state, status.step) == (RunState.RUNNING, 5)
        (told,) = await run.events("checkpoint damaged")
        assert told.endswith("continuing from the checkpoint of step 2: nothing is lost")
        assert await run.resume() == resumed, "a second resume finds the same, and no damage any more"
        assert len(await run.events("checkpoint damaged")) == 1


async def test_several_damaged_checkpoints_are_passed_over_and_where_all_are_the_start_is_refused_in_a_sentence(
    bus: Bus, tmp_path: Path
) -> None:
    run = Played(bus, tmp_path)
    async with running(run.parts), replicas(bus):
        await run.reach(7, every=2)
        for step in (2, 4, 6):
            flip(run.folder(step) / MODEL)
        for _ in range(2):
            with pytest.raises(SettingsError, match="the run cannot continue: no checkpoint is intact") as refused:
                await run.resume()
        sentence = str(refused.value)
        for step in (6, 4, 2):
            damage = f"the checkpoint of step {step} is damaged (the content of {MODEL} has changed; it is"
            assert f"{damage} {run.folder(step)})" in sentence
        status = await run.ledger.status()
        assert (status.state, status.reason, status.step) == (RunState.PAUSED, sentence, 7)
        assert await run.events("resume refused") == [sentence], "said once"
        flip(run.folder(2) / MODEL)  # restore an intact copy
        resumed = await run.resume()
        assert resumed.checkpoint is not None
        assert resumed.checkpoint.state.step == 2
        await _load_and_publish(bus)
        async with replica(bus, 8):
            await until(lambda: _is_running(run.ledger))
        assert (await run.ledger.status()).step == 2
        assert len(await run.events("checkpoint damaged")) == 2


async def test_an_intact_copy_in_object_storage_takes_the_place_of_a_damaged_checkpoint_and_nothing_is_lost(
    bus: Bus, tmp_path: Path, storage: Storage
) -> None:
    run = Played(bus, tmp_path)
    store = CheckpointStore(ObjectStore(storage.settings(), f"damaged-{tmp_path.name}"))
    async with running(run.parts), replicas(bus):
        await run.reach(5, every=2)
        for made in local_store.find(run.root):
            store.put(made)
        flip(run.folder(4) / OPTIMIZER)
        resumed = await run.resume(store)
        assert resumed.checkpoint is not None
        assert resumed.stored is not None
        assert (resumed.checkpoint.folder, resumed.went_back) == (run.folder(4), False)
        assert [entries[0].step for entries in resumed.journal] == [5]
        assert local_store.damage(run.folder(4)) == ""
        (told,) = await run.events("checkpoint damaged")
        assert (
            f"and was replaced by the copy in {resumed.stored.uri}; continuing from the checkpoint of step 4: nothing is"
            in told
        )
        assert (await run.ledger.checkpoints())[V(4)] == str(run.folder(4))
        assert (await run.ledger.status()).step == 5


async def test_a_run_that_people_had_paused_is_paused_by_them_again_once_its_checkpoints_are_back(
    bus: Bus, tmp_path: Path
) -> None:
    run = Played(bus, tmp_path)
    async with running(run.parts), replicas(bus):
        await run.reach(3, every=2)
        await run.ledger.transition(RunState.PAUSED, "for the night", [RunState.RUNNING])
        for damage in (flip, truncate):
            damage(run.folder(2) / MODEL)
            for _ in range(2):
                with pytest.raises(SettingsError):
                    await run.resume()
            reason = (await run.ledger.status()).reason
            assert reason.startswith("the run cannot continue: no checkpoint is intact")
            assert reason.endswith("; the run was paused before: for the night")
        assert len(await run.events("resume refused")) == 2, "each once"
        run.folder(2).rename(tmp_path / "damaged")
        await raw(bus).xtrim(bus.keys.of(streams.JOURNAL), maxlen=0)
        written(run.root, 2)
        assert (await run.resume()).went_back
        status = await run.ledger.status()
        assert (status.state, status.step) == (RunState.PAUSED, 2)
        assert await raw(bus).hget(bus.keys.named("rollback"), "resumes") == b"0"


async def test_a_bus_that_was_lost_is_restored_from_the_newest_intact_checkpoint(bus: Bus, tmp_path: Path) -> None:
    run = Played(bus, tmp_path)
    written(run.root, 2)
    flip(written(run.root, 4).folder / OPTIMIZER)
    resumed = await run.resume()
    assert resumed.checkpoint is not None
    assert (resumed.checkpoint.state.step, resumed.status.step, resumed.went_back) == (2, 2, False)
    (told,) = await run.events("checkpoint damaged")
    assert told.endswith("continuing from the checkpoint of step 2: steps 3 to 4 are trained again")


async def test_a_rollback_to_a_damaged_checkpoint_is_given_up_before_anything_is_loaded(
    bus: Bus, tmp_path: Path
) -> None:
    run = Played(bus, tmp_path)
    async with running(run.parts), replicas(bus):
        await run.reach(5, every=2)
        flip(run.folder(2) / MODEL)
        await run.parts.rollbacks.begin(V(2), "")
        resumed = await run.resume()
        assert resumed.stranded
        await until(lambda: _says(run.ledger, "rollback to version 2 failed: the checkpoint of step 2 is damaged "))
        assert (run.folder(2) / MODEL).is_file(), "it may be mended"
        flip(run.folder(2) / MODEL)
        await run.parts.rollbacks.begin(V(2), "mended")
        assert not (await run.resume()).stranded


async def _says(ledger: Ledger, start: str) -> bool:
    return (await ledger.status()).reason.startswith(start)


async def test_a_checkpoint_that_is_known_under_its_later_version_only_is_gone_back_to_under_that(
    bus: Bus, tmp_path: Path
) -> None:
    """After a bus loss, the ledger lacks the checkpoint's version."""
    run = Played(bus, tmp_path)
    state = CheckpointState(0, V(7), 0, "", 1, 1, "00")
    folder = written(run.root, 0, version=7).folder
    assert state.version == 7
    async with running(run.parts), replicas(bus):
        trainer = await Trainer(bus).start()
        await run.ledger.set_checkpoint(V(0), str(folder))
        await trainer.step()
        await trainer.step()
        await raw(bus).xtrim(bus.keys.of(streams.JOURNAL), maxlen=0)
        resumed = await run.resume()
        assert resumed.went_back
        assert await run.ledger.revoked() == {1, 2}


@pytest.mark.slow
async def test_a_real_trainer_repeats_the_lost_steps_bit_for_bit_from_the_checkpoint_before(
    tmp_path: Path, server: Server
) -> None:
    run = Run(tmp_path, server, "damaged-newest")
    async with bus_of(run) as (bus, ledger):
        await ledger.create()
        await ledger.transition(RunState.RUNNING, "test", [RunState.CREATED])
        await feed(bus, 0, 4 * GROUPS)
        async with run.trainer() as process:
            await run.reaches(ledger, 4, process)
            await until(lambda: _has_checkpoint(ledger, 4))
            await until(lambda: _is_trimmed(bus))  # else the journal continues the previous checkpoint
            expected = await run.weights(ledger)
        (file,) = _folder(run, 4).rglob("zero_pp_rank_0_mp_rank_00_optim_states.pt")
        flip(file)
        async with run.trainer() as process:
            await until(lambda: _newest_is(ledger, 5))
            await feed(bus, 4 * GROUPS, 2 * GROUPS, like=2 * GROUPS)
            await run.reaches(ledger, 4, process)
            again = await run.weights(ledger)
            assert all(torch.equal(again[name], expected[name]) for name in expected)
            await run.stops(process)


def test_experts_in_files_of_their_own_are_refused(tmp_path: Path) -> None:
    whole, policy = written(tmp_path, 1), Settings().policy
    local_store.check_readable(whole, policy)
    more = CheckpointFile("engine/engine/experts_01_model_states.pt", 5, "0" * 64)
    with pytest.raises(
        SettingsError, match="has experts in files of their own, as an unreleased Penstock wrote them: use"
    ):
        local_store.check_readable(dataclasses.replace(whole, files=(*whole.files, more)), policy)
