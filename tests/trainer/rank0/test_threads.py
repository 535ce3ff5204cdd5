"""Laws of what two threads of rank 0 share: the event loop, the training thread, and the one that uploads checkpoints."""

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from services.trainer.metrics import Phases
from services.trainer.rank0.intake import Intake, Taken
from services.trainer.rank0.lead import Lead
from services.trainer.rank0.publication import Publication, Whereabouts
from services.trainer.rank0.retention import Retention
from shared.bus import wire
from shared.bus.bus import Bus
from shared.bus.messages import GroupId, PolicyVersion, StepPlan
from shared.bus.stores.cordon import Cordon
from shared.bus.stores.ledger import Ledger
from shared.bus.stores.live_settings import Live
from shared.bus.stores.run_secret import RunSecret
from shared.bus.streams import EXPERIENCE
from shared.process.service import Context
from shared.process.telemetry import Status
from shared.settings import Settings
from tests.support import builders
from tests.support.object_storage import Storage
from tests.trainer.checkpoint.test_store import settings as store_settings
from tests.trainer.checkpoint.test_store import store_of, written

V = PolicyVersion
GROUPS = 2


class Watched(Intake):
    """An intake that notes which threads change it."""

    threads: set[int]

    def __setattr__(self, name: str, value: object) -> None:
        self.threads.add(threading.get_ident())
        super().__setattr__(name, value)


class Held(dict[GroupId, Taken]):
    """The groups of a watched intake."""

    threads: set[int]

    def __delitem__(self, group_id: GroupId) -> None:
        self.threads.add(threading.get_ident())
        super().__delitem__(group_id)


async def test_the_training_thread_commits_without_touching_the_intake_which_is_the_event_loops(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Publication, "publish", lambda *_: Whereabouts("0" * 64, "", "127.0.0.1:1"))
    tables = {"id": bus.run_id, "folder": tmp_path}
    of = Settings.model_validate({"run": tables, "algorithm": {"groups_per_step": GROUPS}})
    cordon = Cordon(bus, "trainer-0", lambda: None)
    context = Context(of, "trainer", "trainer-0", bus, Status(), asyncio.Event(), Live(bus, of), cordon, RunSecret(bus))
    await Ledger(bus).create()
    for group_id in range(GROUPS):
        await bus.append(EXPERIENCE, {"id": str(group_id), "data": wire.encode(builders.experience(group_id))})
    lead = Lead(context, asyncio.get_running_loop())
    await lead._branch.take_epoch()
    lead._branch.steps[V(0)] = 0
    lead._batch = await lead._next_batch(0) or []
    assert len(lead._batch) == GROUPS
    changed_by: set[int] = set()
    Watched.threads = Held.threads = changed_by
    monkeypatch.setattr(lead._intake, "_held", Held(lead._intake._held))
    monkeypatch.setattr(lead._intake, "__class__", Watched)
    engine: Any = None
    measured, plan = {"kl_mean": 0.0, "entropy": 1.0}, StepPlan(1, "")
    committed = await asyncio.to_thread(lead.commit, engine, 1, measured, plan, None, Phases())
    await lead.clean_up()
    assert committed
    assert lead._intake._held == {}
    assert changed_by == {threading.get_ident()}


async def test_a_version_that_is_made_while_its_checkpoint_is_stored_is_known_to_the_ledger(
    bus: Bus, tmp_path: Path, storage: Storage
) -> None:
    loop, ledger, seen = asyncio.get_running_loop(), Ledger(bus), threading.Event()

    def call(work: Coroutine[Any, Any, Any]) -> Any:
        found = asyncio.run_coroutine_threadsafe(work, loop).result()
        if threading.current_thread() is training and not seen.is_set():
            seen.set()  # it saw that the ledger does not know the checkpoint
            uploading.join(0.5)  # the other thread learns just now that it is stored; it gets as far as it can
        return found

    retention = Retention(store_settings(tmp_path, storage, bus.run_id), bus, call)
    made, store = written(tmp_path / "checkpoints", 1), store_of(storage, bus.run_id)
    stored, _ = store.put(made)

    def note_stored() -> None:
        seen.wait()
        retention._note_stored(store, made, stored)

    uploading = threading.Thread(target=note_stored)
    training = threading.Thread(target=retention.note_version, args=(V(2), made))
    for thread in (uploading, training):
        thread.start()
    for thread in (training, uploading):
        await asyncio.to_thread(thread.join)
    await asyncio.to_thread(retention.close, 1.0)
    assert await ledger.checkpoints() == {V(1): stored.uri, V(2): stored.uri}


def test_what_a_thread_read_of_the_damage_in_a_store_stays_while_another_finds_more(
    tmp_path: Path, storage: Storage
) -> None:
    store = store_of(storage)
    stored, _ = store.put(written(tmp_path, 1))
    storage.damage("r/", "manifest.json")
    before = store.unreadable
    store.whole()
    assert before == {}
    assert set(store.unreadable) == {stored.name}
