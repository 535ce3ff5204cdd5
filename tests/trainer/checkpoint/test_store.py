"""Checkpoints in object storage: whole or absent, found on a new machine; an unreachable store stops nothing."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.services.trainer.checkpoint import local_store, remote_store
from penstock.services.trainer.checkpoint.local_store import Checkpoint
from penstock.services.trainer.checkpoint.manifests import CheckpointState
from penstock.services.trainer.checkpoint.remote_store import CheckpointStore, open_store
from penstock.services.trainer.checkpoint.s3 import ObjectStore
from penstock.services.trainer.checkpoint.uploader import Upload, Uploader, in_thread
from penstock.services.trainer.rank0.mailbox.results import Saved
from penstock.services.trainer.rank0.resume import ResumePoint, find_resume
from penstock.services.trainer.rank0.retention import Retention
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Event, PolicyVersion
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.streams import EVENTS, JOURNAL
from penstock.shared.errors import SettingsError, StoreError, WeightsError
from penstock.shared.settings import Settings, load
from tests.conftest import PATIENCE_S, Server, until
from tests.support.fault_proxy import FaultProxy
from tests.support.object_storage import Storage
from tests.support.raw_redis import raw
from tests.trainer.test_rollback import _begin
from tests.trainer.test_service import GROUPS, Run, bus_of, feed

V = PolicyVersion
_LONG_S = 150.0


def written(
    root: Path, step: int, *, version: int | None = None, journal_entry: str = "", fill: str = "", cursor: int = 8
) -> Checkpoint:
    version = step if version is None else version
    for name in ("engine/engine/mp_rank_00_model_states.pt", "engine/engine/zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        path = local_store.beside(root, step) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name} of version {version} {fill}")
    return local_store.make_whole(root, CheckpointState(step, V(version), cursor, journal_entry, 1, 1, "00"))


def store_of(storage: Storage, run_id: str = "r", **more: Any) -> CheckpointStore:
    return CheckpointStore(ObjectStore(storage.settings(**more), run_id))


def test_what_was_stored_comes_back_byte_by_byte_and_only_its_manifest_makes_it_a_checkpoint(
    tmp_path: Path, storage: Storage
) -> None:
    made, store = written(tmp_path / "here", 20, version=25), store_of(storage)
    stored, sent_bytes = store.put(made)
    assert stored.name.startswith("step-000020-v000025-")
    assert stored.uri == f"s3://runs/team/r/checkpoints/{stored.name}"
    names = [name.rpartition(f"{stored.name}/")[2] for name in storage.names("r/")]
    files = ["engine/engine/mp_rank_00_model_states.pt", "engine/engine/zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    assert names == [*files, "manifest.json", "state.json"]
    assert sent_bytes == sum((made.folder / name).stat().st_size for name in [*files, "state.json"])
    assert store.put(made)[1] == 0, "it is there already"

    (actual,) = store_of(storage).whole()
    fetched = store_of(storage).fetch(actual, tmp_path / "there")
    assert fetched.state == made.state
    assert fetched.folder == tmp_path / "there" / "step-000020"
    assert all((fetched.folder / name).read_bytes() == (made.folder / name).read_bytes() for name in files)
    storage.client.delete_object(Bucket="runs", Key=f"team/r/checkpoints/{stored.name}/manifest.json")
    assert store_of(storage).whole() == []


def test_an_upload_that_was_broken_off_goes_on_where_it_was(tmp_path: Path, storage: Storage) -> None:
    made, store = written(tmp_path, 1), store_of(storage)
    name = store.put(made)[0].name
    lost = f"team/r/checkpoints/{name}"
    storage.client.delete_object(Bucket="runs", Key=f"{lost}/manifest.json")
    storage.client.delete_object(Bucket="runs", Key=f"{lost}/state.json")
    assert store.put(made)[1] == (made.folder / "state.json").stat().st_size
    assert [stored.name for stored in store.whole()] == [name]


def of_two_hosts(root: Path, step: int, fill: str = "") -> Checkpoint:
    """Write a checkpoint of four ranks, two on a host."""
    names = [f"engine/engine/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(4)]
    for name in ("engine/engine/mp_rank_00_model_states.pt", *names):
        path = local_store.beside(root, step) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name} {fill}")
    return local_store.make_whole(root, CheckpointState(step, V(step), 8, "", 4, 1, "00"))


def hosts_of(storage: Storage) -> list[CheckpointStore]:
    return [CheckpointStore(ObjectStore(storage.settings(), "r"), host=host, hosts=2) for host in range(2)]


def test_each_host_sends_its_own_files_and_only_with_all_of_them_is_there_a_checkpoint(
    tmp_path: Path, storage: Storage
) -> None:
    made, (first, second) = of_two_hosts(tmp_path / "here", 3), hosts_of(storage)
    assert second.put_share(made) > 0
    assert second.whole() == []
    ranks = {int(name.partition("_pp_rank_")[2][0]) for name in storage.names("r/") if "_pp_rank_" in name}
    assert ranks == {2, 3}, "those that ran on the second host"
    assert second.put_share(made) == 0, "they are there already"

    stored, sent_bytes = first.put(made)
    assert 0 < sent_bytes < sum(path.stat().st_size for path in made.folder.rglob("*") if path.is_file())
    assert second.put_share(made) == 0
    fetched = store_of(storage).fetch(stored, tmp_path / "there")
    assert fetched.files == made.files


def test_a_host_whose_files_do_not_come_holds_up_no_checkpoint(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "_LEAST_PATIENCE_S", 0.5)
    made, (first, second) = of_two_hosts(tmp_path / "here", 3), hosts_of(storage)
    stored, sent_bytes = first.put(made)
    assert sent_bytes == sum(path.stat().st_size for path in made.folder.rglob("*") if path.is_file())
    assert [each.name for each in first.whole()] == [stored.name]
    monkeypatch.setattr(remote_store, "_PATIENCE", 1e9)
    first.put(of_two_hosts(tmp_path / "here", 4))  # nor the next one, for which it waits the least time
    assert first._others_sent, "every second time it waits longer again"
    third = of_two_hosts(tmp_path / "here", 5)
    second.put_share(third)
    assert first.put(third)[1] < sent_bytes, "it is back"


def test_a_damaged_file_of_another_host_is_sent_by_none(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "_LEAST_PATIENCE_S", 0.5)
    made, hosts = of_two_hosts(tmp_path / "here", 3), hosts_of(storage)
    damaged = made.folder / "engine/engine/zero_pp_rank_3_mp_rank_00_optim_states.pt"
    damaged.write_bytes(damaged.read_bytes()[::-1])
    for send in (hosts[1].put_share, hosts[0].put):
        with pytest.raises(StoreError, match=r"zero_pp_rank_3_.* has changed since it was written: it is damaged"):
            send(made)
    assert hosts[0].whole() == []
    assert not [name for name in storage.names("r/") if "pp_rank_3" in name]


async def test_a_second_host_that_is_killed_while_it_sends_resumes_and_the_first_waits_for_it(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "_LEAST_PATIENCE_S", PATIENCE_S)
    settings = Settings.model_validate(
        {
            "run": {"id": "r", "folder": tmp_path},
            "trainer": {
                "ranks": 2, "nodes": 2, "node": 1, "rendezvous": "127.0.0.1:29500",
                "store": {"uri": "s3://runs/team", "endpoint": storage.endpoint, "counts": "written"},
            },
        }
    )  # fmt: skip
    made = of_two_hosts(settings.run_folder / "checkpoints", 3, fill="x" * (9 << 20))
    file = tmp_path / "settings.json"
    file.write_text(settings.model_dump_json())
    command = [sys.executable, "-c", _SENDS, str(file)]
    sender = subprocess.Popen(command)
    try:
        await until(lambda: storage.names("r/"))
    finally:
        sender.kill()
        sender.wait()
    again = subprocess.Popen(command)
    try:
        first = open_store(settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"node": 0})}))
        assert first is not None
        _, sent_bytes = await in_thread(lambda: first.put(made))
    finally:
        again.kill()
        again.wait()
    (whole,) = first.whole()
    assert sent_bytes < sum(file.nbytes for file in whole.files)
    assert store_of(storage).fetch(whole, tmp_path / "there").files == made.files


_SENDS = """
import sys, time
from pathlib import Path
from penstock.services.trainer.checkpoint.share_uploader import uploading_share
from penstock.shared.settings import Settings
with uploading_share(Settings.model_validate_json(Path(sys.argv[1]).read_text())):
    time.sleep(600)
"""


def test_a_large_file_goes_in_parts_and_comes_back(tmp_path: Path, storage: Storage) -> None:
    path, again = tmp_path / "large", tmp_path / "again"
    path.write_bytes(os.urandom(1 << 20) * 65)
    objects = ObjectStore(storage.settings(), "r")
    objects.upload(path, "large")
    assert storage.client.head_object(Bucket="runs", Key="team/r/large")["ETag"].endswith('-2"'), "two parts"
    assert objects.download("large", again, path.stat().st_size)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("ending", ["mp_rank_00_model_states.pt", "state.json"])
def test_a_file_that_is_not_what_was_written_is_found_when_it_is_fetched(
    tmp_path: Path, storage: Storage, ending: str
) -> None:
    store = store_of(storage)
    stored, _ = store.put(written(tmp_path / "here", 1))
    storage.damage("r/", ending)
    with pytest.raises(
        WeightsError,
        match=rf"expected .*{ending} in s3://runs/team/r/.* with SHA-256 [0-9a-f]{{64}}, found another content",
    ):
        store.fetch(stored, tmp_path / "there")
    assert local_store.find(tmp_path / "there") == []


def test_checkpoints_of_one_step_never_mix_their_files(tmp_path: Path, storage: Storage) -> None:
    store = store_of(storage)
    first, _ = store.put(written(tmp_path / "a", 1, fill="here"))
    second, _ = store.put(written(tmp_path / "b", 1, fill="there"))
    assert first.name != second.name
    for stored, fill in ((first, "here"), (second, "there")):
        fetched = store.fetch(stored, tmp_path / "c")
        assert (fetched.folder / "engine/engine/mp_rank_00_model_states.pt").read_text().endswith(fill)


def test_a_folder_that_became_another_checkpoints_is_not_stored_as_the_first(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, made = store_of(storage), written(tmp_path, 1)
    upload = ObjectStore.upload

    def slow(self: ObjectStore, path: Path, name: str) -> None:
        upload(self, path, name)
        if not path.name.startswith("zero"):
            return
        written(tmp_path, 1, version=9)  # step 1 again, after a rollback

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "upload", slow)
        with pytest.raises(StoreError, match="was removed or replaced meanwhile"):
            store.put(made)
    assert store.whole() == []


def test_what_uploads_left_goes_once_a_newer_one_is_whole(tmp_path: Path, storage: Storage) -> None:
    store = store_of(storage)
    for step in (1, 2, 3):
        store.put(written(tmp_path, step))
    for name in storage.names("r/"):
        if name.endswith("manifest.json") and "step-000002" not in name:
            storage.client.delete_object(Bucket="runs", Key=f"team/{name}")
    left = storage.client.create_multipart_upload(Bucket="runs", Key=f"team/r/checkpoints/{'step-000001-v1-0f'}/x")
    assert left["UploadId"]
    store.clear_remains(before_step=2)
    assert {name.split("/")[2][:11] for name in storage.names("r/")} == {"step-000002", "step-000003"}


class Slow:
    def __init__(self) -> None:
        self.works, self.failed = False, 0
        self.copied: list[str] = []

    def job(self, name: str) -> Upload:
        async def copy() -> int:
            if not self.works:
                self.failed += 1
                raise StoreError("away")
            self.copied.append(name)
            return 1

        return Upload("checkpoint", Path(name), copy, lambda: True)


async def untold(job: Upload, error: StoreError) -> None: ...


@contextlib.asynccontextmanager
async def uploading(failed: Callable[[Upload, StoreError], Awaitable[None]] = untold) -> AsyncIterator[Uploader]:
    uploader = Uploader(failed)
    running = asyncio.create_task(uploader.run())
    try:
        yield uploader
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_the_newest_is_copied_once_the_store_is_back_and_what_it_took_the_place_of_is_not() -> None:
    slow, told = Slow(), []

    async def tell(job: Upload, error: StoreError) -> None:
        told.append((job.folder.name, str(error)))

    async with uploading(tell) as uploader:
        uploader.add(slow.job("one"))
        await until(lambda: slow.failed > 0)
        assert uploader.unstored_s() > 0.0
        uploader.add(slow.job("two"))
        uploader.add(slow.job("three"))
        await until(lambda: not uploader.uses(Path("one")))
        slow.works = True
        await until(lambda: uploader.unstored_s() == 0.0)
    assert slow.copied == ["three"]
    assert told == [("one", "away")], "once, not for each attempt"


async def test_a_store_that_is_slower_than_checkpoints_come_lacks_only_what_came_since_the_last_copy() -> None:
    may_end = threading.Semaphore(0)

    def job(name: str) -> Upload:
        return Upload("checkpoint", Path(name), lambda: in_thread(lambda: int(may_end.acquire())), lambda: True)

    async with uploading() as uploader:
        uploader.add(job("one"))
        await until(lambda: uploader.uses(Path("one")))
        before_s = time.monotonic()
        uploader.add(job("two"))
        may_end.release()
        await until(lambda: uploader.uses(Path("two")))
        assert 0.0 < uploader.unstored_s() <= time.monotonic() - before_s, "not since the first one"
        may_end.release()
        await until(lambda: uploader.unstored_s() == 0.0)


async def test_a_process_that_ends_waits_for_a_copy_but_for_no_store_that_is_away() -> None:
    slow, may_end = Slow(), asyncio.Event()

    async def copy() -> int:
        await may_end.wait()
        slow.copied.append("slow")
        return 1

    async with uploading() as uploader:
        uploader.add(slow.job("away"))
        await until(lambda: slow.failed > 0)
        assert await uploader.close(wait_s=60.0)
        assert not uploader.uses(Path("away"))
        assert slow.copied == []
    async with uploading() as uploader:
        uploader.add(Upload("checkpoint", Path("slow"), copy, lambda: True))
        closing = asyncio.create_task(uploader.close(wait_s=60.0))
        await until(lambda: uploader.uses(Path("slow")))
        may_end.set()
        assert await closing
        assert slow.copied == ["slow"]


async def test_a_process_that_ends_waits_no_longer_than_it_may() -> None:
    async with uploading() as uploader:
        uploader.add(Upload("checkpoint", Path("one"), asyncio.Event().wait, lambda: True))
        await until(lambda: uploader.uses(Path("one")))
        assert not await uploader.close(wait_s=0.0)


async def test_a_bug_in_a_copy_ends_the_task_that_the_driver_waits_for() -> None:
    def bug() -> int:
        raise KeyError("bug")

    uploader = Uploader(untold)
    uploader.add(Upload("checkpoint", Path("one"), lambda: in_thread(bug), lambda: True))
    with pytest.raises(KeyError, match="bug"):
        await uploader.run()


class Kept:
    def __init__(self, bus: Bus, folder: Path, storage: Storage, **more: Any) -> None:
        self.root, self._bus = folder / "checkpoints", bus
        self.made = Retention(settings(folder, storage, bus.run_id, **more), bus)

    async def step(self, step: int) -> Checkpoint:
        """Commit a step and write its checkpoint; two are kept."""
        entry = await self._bus.append(JOURNAL, {"id": str(step), "step": str(step), "data": b""})
        made = written(self.root, step, journal_entry=entry)
        await self.made.note(step, Saved(made))
        return made


@contextlib.asynccontextmanager
async def keeping(bus: Bus, folder: Path, storage: Storage, **more: Any) -> AsyncIterator[Kept]:
    kept = Kept(bus, folder, storage, **more)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(kept.made.run())
        yield kept
        await kept.made.close(60.0)
        running.cancel()


async def test_a_checkpoint_counts_when_it_is_stored_and_the_journal_reaches_back_to_the_last_but_one(
    bus: Bus, tmp_path: Path, storage: Storage
) -> None:
    ledger, run_id = Ledger(bus), bus.run_id
    async with keeping(bus, tmp_path, storage) as kept:
        storage.stop()
        try:
            first = await kept.step(1)
            await until(lambda: _told(bus, "checkpoint not stored"))
            assert await ledger.checkpoints() == {}, "nobody relies on the folder"
            assert await steps_in_journal(bus) == [1]
        finally:
            storage.start()
        await until(lambda: storage.whole(run_id) == [1])
        await kept.step(2)
        await until(lambda: _journal_is(bus, [2]))
    known = await ledger.checkpoints()
    assert sorted(known) == [1, 2]
    assert all(uri.startswith(f"s3://runs/team/{run_id}/checkpoints/step-00000") for uri in known.values())
    assert local_store.is_there(first)


async def test_older_ones_go_from_the_store_unless_the_ledger_keeps_them(
    bus: Bus, tmp_path: Path, storage: Storage
) -> None:
    ledger, run_id = Ledger(bus), bus.run_id
    async with keeping(bus, tmp_path, storage) as kept:
        for step in (1, 2, 3, 4):
            await kept.step(step)
            await until(lambda step=step: _has_checkpoint(ledger, step))
            if step == 1:
                await ledger.pin(V(1), pinned=True)
        await until(lambda: storage.whole(run_id) == [1, 3, 4])
    assert await steps_in_journal(bus) == [4]
    assert sorted(await ledger.checkpoints()) == [1, 3, 4]
    assert [checkpoint.state.step for checkpoint in local_store.find(kept.root)] == [3, 4]


async def test_where_the_folder_outlives_its_machine_a_checkpoint_counts_at_once(
    bus: Bus, tmp_path: Path, storage: Storage
) -> None:
    storage.stop()
    try:
        async with keeping(bus, tmp_path, storage, counts="written") as kept:
            made = await kept.step(1)
            assert await Ledger(bus).checkpoints() == {1: str(made.folder)}
            assert await steps_in_journal(bus) == []
    finally:
        storage.start()


async def _has_checkpoint(ledger: Ledger, version: int) -> bool:
    return V(version) in await ledger.checkpoints()


def settings(folder: Path, storage: Storage, run_id: str, **more: Any) -> Settings:
    store = storage.settings(**more).model_dump()
    return Settings.model_validate(
        {"run": {"id": run_id, "folder": folder, "steps": 50}, "trainer": {"store": store}, "policy": {"model": "m"}}
    )


async def resume_of(bus: Bus, of: Settings) -> ResumePoint:
    return await find_resume(bus, Ledger(bus), Live(bus, of), of, open_store(of))


async def events(bus: Bus) -> list[str]:
    from penstock.shared.bus.encoding import wire

    rows = await raw(bus).xrange(bus.keys.of(EVENTS))
    return [wire.decode(fields[b"data"], Event).name for _, fields in rows]


async def test_with_bus_and_folder_lost_the_run_goes_on_from_the_store_and_no_version_is_used_again(
    bus: Bus, tmp_path: Path, storage: Storage
) -> None:
    of = settings(tmp_path / "new", storage, bus.run_id)
    store = store_of(storage, bus.run_id)
    for step in (2, 4):
        store.put(written(tmp_path / "old", step, version=step + 1))
    resume = await resume_of(bus, of)
    assert resume.checkpoint is not None
    assert (resume.checkpoint.state.step, resume.status.step) == (4, 4)
    assert resume.status.newest_version == 5 + 100_000, (
        "which ones were published after version 5, nobody knows any more"
    )
    assert await events(bus) == ["run restored"]


async def test_with_the_folder_there_a_start_needs_no_store(bus: Bus, tmp_path: Path, storage: Storage) -> None:
    of = settings(tmp_path, storage, bus.run_id, endpoint="http://127.0.0.1:9")  # where nothing listens
    made = written(of.run_folder / "checkpoints", 4)
    await raw(bus).hset(bus.keys.named("run"), mapping={"step": 4, "newest_version": 4})
    assert (await resume_of(bus, of)).checkpoint == made


async def test_a_start_that_needs_the_store_waits_while_it_is_away(bus: Bus, tmp_path: Path, storage: Storage) -> None:
    of = settings(tmp_path / "new", storage, bus.run_id)
    store_of(storage, bus.run_id).put(written(tmp_path / "old", 4))
    await raw(bus).hset(bus.keys.named("run"), mapping={"step": 4, "newest_version": 4})
    storage.stop()
    try:
        waiting = asyncio.create_task(resume_of(bus, of))
        await until(lambda: _told(bus, "waiting for object storage"))
        assert not waiting.done()
    finally:
        storage.start()
    resumed = await asyncio.wait_for(waiting, PATIENCE_S)
    assert resumed.checkpoint is not None
    assert resumed.checkpoint.state.step == 4
    assert resumed.stored is not None


def _is_not_stored(run: Run, checkpoint: str) -> bool:
    return any('"not stored"' in line and checkpoint in line for line in run.log.read_text().splitlines())


async def _told(bus: Bus, name: str) -> bool:
    return name in await events(bus)


async def test_a_start_that_needs_the_store_and_is_denied_says_so_in_a_sentence(
    bus: Bus, tmp_path: Path, storage: Storage
) -> None:
    storage.deny()
    try:
        with pytest.raises(SettingsError, match=r"change trainer\.store or the credentials in the environment"):
            await resume_of(bus, settings(tmp_path, storage, bus.run_id))
    finally:
        storage.deny(denied=False)


async def test_a_damaged_manifest_is_told_and_a_run_of_which_nothing_can_be_read_is_not_begun_anew(
    bus: Bus, tmp_path: Path, storage: Storage
) -> None:
    of = settings(tmp_path / "new", storage, bus.run_id)
    store_of(storage, bus.run_id).put(written(tmp_path / "old", 4))
    storage.damage(bus.run_id, "manifest.json")
    with pytest.raises(
        SettingsError, match=r"no checkpoint is intact: the checkpoint of step 4 is damaged \(the manifest of "
    ):
        await resume_of(bus, of)
    assert await events(bus) == ["stored checkpoint damaged", "resume refused"]


def test_several_hosts_say_that_their_folder_outlives_them(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[trainer]\nnodes = 2\nrendezvous = "a:1"\n[trainer.store]\nuri = "s3://runs"\n')
    with pytest.raises(SettingsError, match=r'expected trainer\.store\.counts = "written" with trainer\.nodes = 2'):
        load(config)
    assert load(config, ["--trainer.store.counts", "written"]).trainer.nodes == 2


@pytest.mark.parametrize("key", ["uri", "endpoint"])
def test_credentials_in_a_url_are_refused(tmp_path: Path, key: str) -> None:
    config = tmp_path / "run.toml"
    urls = {"uri": "s3://key:secret@runs", "endpoint": "https://key:secret@host"}
    config.write_text(f'[trainer.store]\n{key} = "{urls[key]}"\n')
    with pytest.raises(SettingsError, match=rf"trainer\.store\.{key}"):
        load(config)


def test_without_boto3_the_setting_is_refused_in_a_sentence(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(SettingsError, match=r"trainer\.store\.uri needs boto3 .*: pip install .*s3"):
        store_of(storage)


def lose_machine(run: Run) -> None:
    shutil.rmtree(run.folder / "runs")
    shutil.rmtree(run.folder / f"weights-{run.run_id}")


async def steps_in_journal(bus: Bus) -> list[int]:
    rows = await raw(bus).xrange(bus.keys.of(JOURNAL))
    return sorted({int(fields[b"step"]) for _, fields in rows})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "zero_stage"), [(2, 2)])
async def test_a_run_whose_machine_is_lost_goes_on_elsewhere_from_the_store_with_the_same_weights(
    tmp_path: Path, server: Server, storage: Storage, ranks: int, zero_stage: int
) -> None:
    run = Run(
        tmp_path, server, f"lost-{uuid.uuid4().hex[:6]}", ranks=ranks, zero_stage=zero_stage, checkpoint_every_steps=1
    )
    proxy = FaultProxy("127.0.0.1", storage.port)
    port = await proxy.start()
    with run.config.open("a") as file:
        file.write(f'[trainer.store]\nuri = "s3://runs/team"\nendpoint = "http://127.0.0.1:{port}"\n')

    async def weights_of(version: int) -> dict[str, torch.Tensor]:
        await until(lambda: _newest_is(ledger, version), timeout_s=_LONG_S)
        return await run.weights(ledger)

    async with bus_of(run) as (bus, ledger):
        # Killed during an upload, with its machine; the journal has steps 1 and 2.
        async with run.trainer() as process:
            await feed(bus, 0, GROUPS)
            await run.reaches(ledger, 1, process)
            await until(lambda: _told(bus, "checkpoint stored"), timeout_s=_LONG_S)
            proxy.delay_s = 0.1
            await feed(bus, GROUPS, GROUPS)
            await run.reaches(ledger, 2, process)
            expected = await run.weights(ledger)
            await until(lambda: bool(storage.names(f"{run.run_id}/checkpoints/step-000002")), timeout_s=_LONG_S)
            os.kill(process.pid, signal.SIGKILL)
        proxy.delay_s = 0.0
        proxy.cut()
        assert storage.whole(run.run_id) == [1], "a part of a checkpoint is none"
        assert await steps_in_journal(bus) == [1, 2]
        lose_machine(run)

        # On another machine. An unreachable store gets the newest checkpoint later.
        async with run.trainer() as process:
            again = await weights_of(3)
            assert all(torch.equal(again[name], expected[name]) for name in expected)
            storage.stop()
            await feed(bus, 2 * GROUPS, GROUPS)
            await until(lambda: _told(bus, "checkpoint not stored"), timeout_s=_LONG_S)
            await feed(bus, 3 * GROUPS, GROUPS)
            fourth = await weights_of(5)
            await until(lambda: _is_not_stored(run, "step-000004"), timeout_s=_LONG_S)  # an attempt of step 3 is over
            storage.start()
            await until(lambda: storage.whole(run.run_id) == [1, 4], timeout_s=_LONG_S)
            await until(lambda: _journal_is(bus, [2, 3, 4]), timeout_s=_LONG_S)
            await feed(bus, 4 * GROUPS, GROUPS)
            expected = await weights_of(6)
            await until(lambda: storage.whole(run.run_id) == [4, 5], timeout_s=_LONG_S)
            await until(lambda: _journal_is(bus, [5]), timeout_s=_LONG_S)
            assert not storage.names(f"{run.run_id}/checkpoints/step-000002"), "what the killed upload left is gone"
            await until(lambda: f"{run.run_id}/policy/config.json" in storage.names(run.run_id), timeout_s=_LONG_S)
            os.kill(process.pid, signal.SIGKILL)
        lose_machine(run)

        # With the newest checkpoint damaged, the previous one and the journal give the same weights.
        storage.damage(f"{run.run_id}/checkpoints/step-000005", "mp_rank_00_model_states.pt")
        async with run.trainer() as process:
            weights = await weights_of(7)
            assert await _told(bus, "stored checkpoint damaged")
            assert all(torch.equal(weights[name], expected[name]) for name in expected)
            (uri,) = {where for version, where in (await ledger.checkpoints()).items() if version == 5}
            assert uri.startswith(f"s3://runs/team/{run.run_id}/checkpoints/step-000004-v000005-")

            # Rollback to a checkpoint that only the store has.
            shutil.rmtree(run.folder / "runs" / run.run_id / "checkpoints")
            await _begin(bus, ledger, tmp_path, 5)
            back = await weights_of(8)
            assert all(torch.equal(back[name], fourth[name]) for name in fourth)
            await until(lambda: _is_stored(ledger, 8, uri), timeout_s=_LONG_S)  # noted after the version is live
            await run.stops(process)
    await proxy.close()


async def _is_stored(ledger: Ledger, version: int, uri: str) -> bool:
    return (await ledger.checkpoints()).get(V(version)) == uri


async def _newest_is(ledger: Ledger, version: int) -> bool:
    return (await ledger.status()).newest_version == version


async def _journal_is(bus: Bus, steps: list[int]) -> bool:
    return await steps_in_journal(bus) == steps
