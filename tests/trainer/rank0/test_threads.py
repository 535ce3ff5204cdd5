"""Objects of the event loop and the training thread are called only there."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from penstock.services.trainer.algorithm.update import Learner
from penstock.services.trainer.checkpoint.remote_store import StoredCheckpoint
from penstock.services.trainer.checkpoint.uploader import Uploader
from penstock.services.trainer.export.exporter import Exporter
from penstock.services.trainer.loop import Trainer
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.phases import Phases
from penstock.services.trainer.rank0.artifacts import Artifacts
from penstock.services.trainer.rank0.branch import Branch
from penstock.services.trainer.rank0.driver import Driver
from penstock.services.trainer.rank0.intake import Intake
from penstock.services.trainer.rank0.opening import Opening
from penstock.services.trainer.rank0.probe import Prober
from penstock.services.trainer.rank0.publication import Publication
from penstock.services.trainer.rank0.retention import Retention
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.replicas.live_settings import Live
from tests.conftest import until
from tests.support.driven import Driven, settings_of
from tests.support.object_storage import Storage
from tests.trainer.algorithm import test_update
from tests.trainer.algorithm.test_update import Rank
from tests.trainer.checkpoint.test_store import settings as store_settings
from tests.trainer.checkpoint.test_store import store_of, written

pytestmark = pytest.mark.usefixtures("one_rank")

V = PolicyVersion
EVENT_LOOP = (Driver, Branch, Intake, Retention, Uploader, Opening, Exporter, Ledger, Live, Bus)
TRAINING = (Trainer, Learner, TrainingEngine, Phases, Prober, Artifacts, Publication)
ANY_THREAD = {"unstored_s", "__init__", "_write", "complete"}
"""The last two: what writes a checkpoint beside training."""


class Calls:
    """Method calls by thread, while :meth:`watched` runs."""

    def __init__(self) -> None:
        self.by_class: dict[type, set[int]] = {}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        owner = type(frame.f_locals.get("self"))
        if event == "call" and frame.f_code.co_name not in ANY_THREAD and issubclass(owner, (*EVENT_LOOP, *TRAINING)):
            self.by_class.setdefault(owner, set()).add(threading.get_ident())

    def threads_of(self, classes: tuple[type, ...]) -> set[int]:
        return {thread for owner, threads in self.by_class.items() if issubclass(owner, classes) for thread in threads}


@pytest.fixture
def calls() -> Iterator[Calls]:
    recorded = Calls()
    before = sys.getprofile()
    threading.setprofile(recorded.note)
    sys.setprofile(recorded.note)
    yield recorded
    sys.setprofile(before)
    threading.setprofile(None)


async def test_objects_of_the_event_loop_are_called_there_alone_and_objects_of_training_on_its_thread_alone(
    bus: Bus, tmp_path: Path, storage: Storage, calls: Calls
) -> None:
    store = store_settings(tmp_path, storage, bus.run_id).trainer.store.model_dump()
    of = settings_of(bus, tmp_path, test_update.settings(max_lag=8), checkpoint_every_steps=1, store=store)
    driven, training = Driven(bus, of), []
    await driven.ledger.create()
    await driven.ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    calls.by_class.clear()

    def train() -> None:
        training.append(threading.get_ident())
        driven.train(Rank(of).engine)

    async with driven.running(train):
        await driven.feed(test_update.batch())
        await until(lambda: storage.whole(bus.run_id) == [1])
    assert await driven.step() == 1
    assert calls.threads_of(EVENT_LOOP) == {threading.get_ident()}
    assert calls.threads_of(TRAINING) == set(training)
    assert {Driver, Branch, Intake, Retention, Uploader, Opening, Ledger, Trainer, Learner, Publication} <= set(
        calls.by_class
    )


async def test_a_call_from_another_thread_is_seen(bus: Bus, calls: Calls) -> None:
    branch = Branch(bus)
    other: list[int] = []

    def call() -> None:
        other.append(threading.get_ident())
        branch.next_version()

    thread = threading.Thread(target=call)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert calls.threads_of((Branch,)) == set(other)


async def test_a_version_that_is_made_while_its_checkpoint_is_stored_is_known_to_the_ledger(
    bus: Bus, tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    retention = Retention(store_settings(tmp_path, storage, bus.run_id), bus)
    made, store = written(tmp_path / "checkpoints", 1), store_of(storage, bus.run_id)
    stored, _ = store.put(made)
    seen, look = asyncio.Event(), Ledger.checkpoints
    naming: asyncio.Task[None] | None = None

    async def checkpoints(self: Ledger) -> dict[PolicyVersion, str]:
        known = await look(self)
        if asyncio.current_task() is naming:
            seen.set()  # it saw an unknown checkpoint
            await asyncio.sleep(0.2)
        return known

    async def note_stored(stored: StoredCheckpoint) -> None:
        await seen.wait()
        await retention._note_stored(store, made, stored)

    monkeypatch.setattr(Ledger, "checkpoints", checkpoints)
    naming = asyncio.create_task(retention.note_version(V(2), made))
    await asyncio.gather(naming, note_stored(stored))
    assert await look(Ledger(bus)) == {V(1): stored.uri, V(2): stored.uri}


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
