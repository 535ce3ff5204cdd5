"""Record checkpoints in the ledger, copy them to storage, and delete older ones and the journal before them.

::

                          counts = "written", or no store         counts = "stored"
    whole in the folder   ledger, journal forgotten               (it is copied)
    whole in the store    the ledger names the copy instead       ledger, journal forgotten before the last but one

With "stored" the folder may vanish at any time. Pins and a rollback's tip are kept. Rank 0 only.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from penstock.services.trainer import metrics
from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.local_store import Checkpoint
from penstock.services.trainer.checkpoint.manifests import CheckpointState
from penstock.services.trainer.checkpoint.remote_store import CheckpointStore, StoredCheckpoint, open_store, version_in
from penstock.services.trainer.checkpoint.uploader import Upload, Uploader, in_thread
from penstock.services.trainer.rank0.mailbox.results import Saved
from penstock.services.trainer.rank0.resume import ResumePoint
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.bus.stores.experience.signals import read_signals
from penstock.shared.bus.stores.policy.ledger import CHECKPOINT, Ledger
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.stores.run.functions import read_functions
from penstock.shared.errors import StoreError
from penstock.shared.process.telemetry import tell
from penstock.shared.settings import Settings
from penstock.shared.tasks import together

log = logging.getLogger(__name__)

_LOOK_S = 1.0
SILENT_S = 10.0
"""Time without an answer of the object storage after which that is reported."""


class Retention:
    """Retains checkpoints; on the event loop, with storage access in threads.

    ``reading`` returns the checkpoint that an export reads.
    """

    def __init__(self, settings: Settings, bus: Bus, reading: Callable[[], str] = lambda: "") -> None:
        self._trainer = settings.trainer
        self._options = settings.trainer.store
        self._bus = bus
        self._ledger = Ledger(bus)
        self._reading = reading
        self.store = open_store(settings)
        self._uploader = Uploader(self._tell_failure) if self.store is not None else None
        self._relies_on_folder = self.store is None or self._options.counts == "written"
        self._naming = asyncio.Lock()
        """Guards read-modify-write of ledger entries by two tasks."""
        self._same: dict[PolicyVersion, list[PolicyVersion]] = {}
        """By version of an unrecorded checkpoint, later versions of its weights."""

    async def run(self) -> None:
        """Copy checkpoints to object storage, if any, forever."""
        if self._uploader is not None:
            await together([self._uploader.run(), self._tell_silence()])

    async def describe(self, step: int, version: PolicyVersion, live: Live) -> CheckpointState:
        """Return the ledger state for a checkpoint of ``step``, whose newest version is ``version``."""
        (status, counts), entry = await self._ledger.account(), await self._ledger.last_journal_entry()
        mark = await self._ledger.mark(version)
        revision = await live.read(live.revision)
        return CheckpointState(
            step=step,
            version=version,
            cursor=status.cursor,
            position=None if mark is None else mark[1],
            counts=counts,
            journal_entry=entry,
            ranks=self._trainer.ranks * self._trainer.nodes,
            zero_stage=self._trainer.zero_stage,
            expert_parallel=self._trainer.expert_parallel,
            settings_revision=live.revision,
            live_values={} if revision is None else revision.values,
            signals=await read_signals(self._bus),
            functions={name: sources[-1].sha256 for name, sources in (await read_functions(self._bus)).items()},
            gpu_s=status.gpu_s,
            gpu_until_s=status.gpu_until_s,
            pins=await self._as_restored(await self._ledger.pins()),
            released=await self._as_restored(await self._ledger.released()),
        )

    async def _as_restored(self, versions: Iterable[PolicyVersion]) -> list[PolicyVersion]:
        """Return ``versions`` by the numbers in their checkpoints, the only ones that are known once the bus is lost."""
        places = await self._ledger.checkpoints()
        return sorted({await asyncio.to_thread(_number, places.get(version, ""), version) for version in versions})

    async def note(self, step: int, saved: Saved) -> None:
        """Handle the checkpoint of ``step``, which is complete in the run's folder, or was refused by storage."""
        await self._ledger.note_missing(CHECKPOINT, saved.refusal)
        if saved.checkpoint is None:
            await self._note_failed(step, saved.refusal)
            return
        checkpoint, state = saved.checkpoint, saved.checkpoint.state
        superfluous = await asyncio.to_thread(
            local_store.superfluous, checkpoint.folder.parent, self._trainer.keep_last
        )
        if self._relies_on_folder:
            await self._ledger.set_checkpoint(state.version, str(checkpoint.folder))
        for old in superfluous:
            if self._is_used(old.folder):
                continue
            if await self._ledger.forget_checkpoint(str(old.folder)):
                await asyncio.to_thread(local_store.delete, old)
        if self._relies_on_folder and state.journal_entry:
            await self._ledger.trim_journal(state.journal_entry)
        log.info("checkpoint written", extra={"step": state.step, "folder": str(checkpoint.folder)})
        self._copy(checkpoint)

    def _is_used(self, folder: Path) -> bool:
        return str(folder) == self._reading() or (self._uploader is not None and self._uploader.uses(folder))

    async def _note_failed(self, step: int, error: str) -> None:
        """Report that the checkpoint of ``step`` failed; the previous one and the journal are kept."""
        metrics.CHECKPOINTS_FAILED.inc()
        detail = f"the checkpoint of step {step} was refused, the previous one is kept: {error}: free disk space in run.folder"
        log.warning("checkpoint failed", extra={"detail": detail})
        await tell(self._bus, "trainer", "checkpoint failed", detail, step=step)

    async def note_start(self, resume: ResumePoint) -> None:
        """Copy the start's checkpoint if it is only in the folder."""
        if resume.stored is not None:
            await self._ledger.set_checkpoint(resume.stored.state.version, resume.stored.uri)
        elif resume.checkpoint is not None:
            self._copy(resume.checkpoint)

    async def note_version(self, version: PolicyVersion, checkpoint: Checkpoint) -> None:
        """Record in the ledger that ``version`` has the weights of ``checkpoint``."""
        async with self._naming:
            known = (await self._ledger.checkpoints()).get(checkpoint.state.version)
            if self._relies_on_folder or known is not None:
                await self._ledger.set_checkpoint(version, known or str(checkpoint.folder))
            else:
                self._same.setdefault(checkpoint.state.version, []).append(version)

    def note_policy(self, folder: Path) -> None:
        """Have the final policy copied."""
        store = self.store
        if store is not None and self._uploader is not None:
            copy = functools.partial(in_thread, functools.partial(store.put_folder, folder))
            self._uploader.add(Upload(folder.name, folder, copy, folder.is_dir))

    @property
    def is_stored(self) -> bool:
        """Whether nothing waits to be copied."""
        return self._uploader is None or self._uploader.is_idle

    async def make_room(self) -> None:
        """Release the journal covered by the newest counting checkpoint: the bus is full."""
        if self.store is not None and not self._relies_on_folder:
            try:
                usable = await self._usable(self.store)
            except StoreError as error:
                log.warning("the journal stays on a full bus", extra={"error": str(error)})
                return
            if usable and (entry := usable[-1].state.journal_entry):
                await self._ledger.trim_journal(entry)

    async def close(self, wait_s: float) -> None:
        """Finish copying, for at most ``wait_s``."""
        if self._uploader is not None and not await self._uploader.close(wait_s):
            log.warning("exited before all checkpoints were stored", extra={"uri": self._options.uri})

    def _copy(self, checkpoint: Checkpoint) -> None:
        store = self.store
        if store is None or self._uploader is None:
            return

        async def copy() -> int:
            stored, sent_bytes = await in_thread(lambda: store.put(checkpoint))
            await self._note_stored(store, checkpoint, stored)
            return sent_bytes

        self._uploader.add(Upload("checkpoint", checkpoint.folder, copy, lambda: local_store.is_there(checkpoint)))

    async def _note_stored(self, store: CheckpointStore, checkpoint: Checkpoint, stored: StoredCheckpoint) -> None:
        async with self._naming:
            known = await self._ledger.checkpoints()
            versions = {version for version, where in known.items() if where == str(checkpoint.folder)}
            for version in sorted({stored.state.version, *versions, *self._same.pop(stored.state.version, ())}):
                await self._ledger.set_checkpoint(version, stored.uri)
        metrics.STORED_STEP.set(stored.state.step)
        metrics.STORED_AT.set(stored.stored_at_s)
        detail = f"the checkpoint of step {stored.state.step} is whole in {stored.uri}"
        await tell(self._bus, "trainer", "checkpoint stored", detail, step=stored.state.step)
        try:
            usable = await self._usable(store)
            await self._trim_journal(usable)
            await self._clean(store, usable)
        except StoreError as error:
            log.warning("object storage was not cleaned up", extra={"error": str(error)})

    async def _usable(self, store: CheckpointStore) -> list[StoredCheckpoint]:
        revoked = await self._ledger.revoked()
        on_branch = [stored for stored in await in_thread(store.whole) if stored.state.version not in revoked]
        return [stored for stored in on_branch if stored.name not in store.damaged]

    async def _trim_journal(self, usable: Sequence[StoredCheckpoint]) -> None:
        if self._relies_on_folder:
            return
        back = min(2, self._trainer.keep_last)
        if len(usable) >= back and (entry := usable[-back].state.journal_entry):
            await self._ledger.trim_journal(entry)

    async def _clean(self, store: CheckpointStore, usable: Sequence[StoredCheckpoint]) -> None:
        kept = {stored.name for stored in usable[-self._trainer.keep_last :]}
        for old in await in_thread(store.whole):
            if old.name not in kept and await self._ledger.forget_checkpoint(old.uri):
                await in_thread(functools.partial(store.delete, old))
        if usable:
            await in_thread(lambda: store.clear_remains(usable[-1].state.step))

    async def _tell_silence(self) -> None:
        """Report a storage that hangs long before its requests fail, which are patient with a slow one."""
        is_silent = False
        while self.store is not None:
            await asyncio.sleep(_LOOK_S)
            if (self.store.silent_s > SILENT_S) == is_silent:
                continue
            is_silent = not is_silent
            detail = f"object storage has not answered for {SILENT_S:.0f} s: training continues, and the request waits"
            if is_silent:
                await tell(self._bus, "trainer", "object storage silent", f"{self._options.uri}: {detail}")
            else:
                await tell(self._bus, "trainer", "object storage answers again", self._options.uri)

    async def _tell_failure(self, job: Upload, error: StoreError) -> None:
        cause = "denied" if error.denied else "away"
        detail = (
            f"{job.folder.name} is not in object storage yet ({cause}), training continues and the upload is retried: "
            f"{error}"
        )
        await tell(self._bus, "trainer", "checkpoint not stored", detail, denied=error.denied)


def _number(place: str, version: PolicyVersion) -> PolicyVersion:
    """Return the version in the checkpoint at ``place``, a folder or URI; without one ``version``."""
    if (stored := version_in(place)) is not None:
        return stored
    checkpoint = local_store.read(Path(place)) if place else None
    return version if checkpoint is None else checkpoint.state.version
