"""What becomes of a checkpoint: the ledger learns of it, older ones go, the journal before it is forgotten, a copy is stored.

::

                          counts = "written", or no store         counts = "stored"
    whole in the folder   ledger, journal forgotten               (it is copied)
    whole in the store    the ledger names the copy instead       ledger, journal forgotten before the last but one

With "stored" nobody relies on the folder: it may vanish with its machine at any moment, and everything since the checkpoint before
the newest stored one is in the journal. Older ones go, here and there, unless the ledger keeps them (pins, the tip of a rollback).

Rank 0 only. It waits for the bus, and for the store in the uploader's thread alone, or where nothing can be trained anyway (a full bus).
"""

import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from services.trainer import metrics
from services.trainer.checkpoint import local_store
from services.trainer.checkpoint.local_store import Checkpoint
from services.trainer.checkpoint.remote_store import CheckpointStore, StoredCheckpoint, open_store
from services.trainer.checkpoint.uploader import Upload, Uploader
from services.trainer.rank0.resume import Resume
from shared.bus.bus import Bus
from shared.bus.messages import PolicyVersion
from shared.bus.stores.ledger import Ledger
from shared.errors import StoreError
from shared.process.telemetry import tell
from shared.settings import Settings

log = logging.getLogger(__name__)

Call = Callable[[Coroutine[Any, Any, Any]], Any]


class Retention:
    """Keeps checkpoints.

    Args:
        settings: of the run.
        bus: of the run.
        call: runs a coroutine on the event loop and waits for it, from any thread.
        reading: says which checkpoint an export reads now.
    """

    def __init__(self, settings: Settings, bus: Bus, call: Call, reading: Callable[[], str] = lambda: "") -> None:
        self._uri, self._keep_last = settings.trainer.store.uri, settings.trainer.keep_last
        self._bus = bus
        self._ledger = Ledger(bus)
        self._call = call
        self._reading = reading
        self.store = open_store(settings)
        self._uploader = Uploader(self._tell_failure) if self.store is not None else None
        self._relies_on_folder = self.store is None or settings.trainer.store.counts == "written"
        self._naming = threading.Lock()
        """Held from reading to writing what the ledger knows of a checkpoint, which both threads do; see ``_same``."""
        self._same: dict[PolicyVersion, list[PolicyVersion]] = {}
        """By the version of a checkpoint that the ledger does not know yet: later versions of the same weights."""

    def check(self) -> None:
        """Raise what a bug in the uploader's thread raised."""
        if self._uploader is not None:
            self._uploader.check()

    # ---------------------------------------------------------------- written

    def note(self, checkpoint: Checkpoint, superfluous: Sequence[Checkpoint]) -> None:
        """Do what follows from a checkpoint that is whole in the run's folder."""
        state = checkpoint.state
        if self._relies_on_folder:
            self._call(self._ledger.set_checkpoint(state.version, str(checkpoint.folder)))
        for old in superfluous:
            if self._is_used(old.folder):
                continue  # goes with the next one
            if self._call(self._ledger.forget_checkpoint(str(old.folder))):
                local_store.delete(old)
        if self._relies_on_folder and state.journal_entry:
            self._call(self._ledger.trim_journal(state.journal_entry))
        log.info("checkpoint written", extra={"step": state.step, "folder": str(checkpoint.folder)})
        self._copy(checkpoint)

    def _is_used(self, folder: Path) -> bool:
        """Whether somebody reads a checkpoint: the uploader, or an export."""
        return str(folder) == self._reading() or (self._uploader is not None and self._uploader.uses(folder))

    def note_failed(self, step: int, error: str) -> None:
        """Tell that the checkpoint of ``step`` could not be written; the one before stays, and so does the journal."""
        metrics.CHECKPOINTS_FAILED.inc()
        detail = f"the checkpoint of step {step} was refused, the one before stays: {error}: make room in run.folder"
        log.warning("checkpoint failed", extra={"detail": detail})
        self._call(tell(self._bus, "trainer", "checkpoint failed", detail, step=step))

    def note_start(self, resume: Resume) -> None:
        """Do what follows from going on from a checkpoint: one that is in the folder alone is copied."""
        if resume.stored is not None:
            self._call(self._ledger.set_checkpoint(resume.stored.state.version, resume.stored.uri))
        elif resume.checkpoint is not None:
            self._copy(resume.checkpoint)

    def note_version(self, version: PolicyVersion, checkpoint: Checkpoint) -> None:
        """Tell the ledger that ``version`` has the weights of ``checkpoint``, from which the trainer went on."""
        with self._naming:
            known = self._call(self._ledger.checkpoints()).get(checkpoint.state.version)
            if self._relies_on_folder or known is not None:
                self._call(self._ledger.set_checkpoint(version, known or str(checkpoint.folder)))
            else:
                self._same.setdefault(checkpoint.state.version, []).append(version)

    def note_policy(self, folder: Path) -> None:
        """Have the final policy copied."""
        store = self.store
        if store is not None and self._uploader is not None:
            self._uploader.add(Upload(folder.name, folder, lambda: store.put_folder(folder), folder.is_dir))

    def make_room(self) -> None:
        """Forget all of the journal that the newest checkpoint that counts covers: the bus is full."""
        if self.store is not None and not self._relies_on_folder:
            try:
                usable = self._usable(self.store)
            except StoreError as error:
                log.warning("the journal stays on a full bus", extra={"error": str(error)})
                return
            if usable and (entry := usable[-1].state.journal_entry):
                self._call(self._ledger.trim_journal(entry))

    def close(self, wait_s: float) -> None:
        """Let what is being copied be finished, for at most ``wait_s``."""
        if self._uploader is not None and not self._uploader.close(wait_s):
            log.warning("left before everything was stored", extra={"uri": self._uri})

    # ---------------------------------------------------------------- stored, in the uploader's thread

    def _copy(self, checkpoint: Checkpoint) -> None:
        store = self.store
        if store is None or self._uploader is None:
            return

        def copy() -> int:
            stored, sent_bytes = store.put(checkpoint)
            self._note_stored(store, checkpoint, stored)
            return sent_bytes

        self._uploader.add(Upload("checkpoint", checkpoint.folder, copy, lambda: local_store.is_there(checkpoint)))

    def _note_stored(self, store: CheckpointStore, checkpoint: Checkpoint, stored: StoredCheckpoint) -> None:
        with self._naming:
            known = self._call(self._ledger.checkpoints())
            versions = {version for version, where in known.items() if where == str(checkpoint.folder)}
            for version in sorted({stored.state.version, *versions, *self._same.pop(stored.state.version, ())}):
                self._call(self._ledger.set_checkpoint(version, stored.uri))
        metrics.STORED_STEP.set(stored.state.step)
        metrics.STORED_AT.set(stored.stored_at_s)
        detail = f"the checkpoint of step {stored.state.step} is whole in {stored.uri}"
        self._call(tell(self._bus, "trainer", "checkpoint stored", detail, step=stored.state.step))
        try:
            usable = self._usable(store)
            self._trim_journal(usable)
            self._clean(store, usable)
        except StoreError as error:  # the next one does it
            log.warning("object storage was not tidied", extra={"error": str(error)})

    def _usable(self, store: CheckpointStore) -> list[StoredCheckpoint]:
        revoked = self._call(self._ledger.revoked())
        found = [one for one in store.whole() if one.state.version not in revoked]
        return [one for one in found if one.name not in store.damaged]

    def _trim_journal(self, usable: Sequence[StoredCheckpoint]) -> None:
        if self._relies_on_folder:
            return
        back = min(2, self._keep_last)
        if len(usable) >= back and (entry := usable[-back].state.journal_entry):
            self._call(self._ledger.trim_journal(entry))

    def _clean(self, store: CheckpointStore, usable: Sequence[StoredCheckpoint]) -> None:
        kept = {one.name for one in usable[-self._keep_last :]}
        for old in store.whole():
            if old.name not in kept and self._call(self._ledger.forget_checkpoint(old.uri)):
                store.delete(old)
        if usable:
            store.clear_remains(usable[-1].state.step)

    def _tell_failure(self, job: Upload, error: StoreError) -> None:
        what = "denied" if error.denied else "away"
        detail = (
            f"{job.folder.name} is not in object storage yet ({what}), training goes on and it is tried again: {error}"
        )
        self._call(tell(self._bus, "trainer", "checkpoint not stored", detail, denied=error.denied))
