"""The newest intact checkpoint of a run, in its folder or in object storage.

::

    run folder, newest first ──▶ intact? ──▶ newer than the ledger, or continued by the journal ──▶ this one
                     └ damaged: next older one      └ neither: a newer one of the store, newest first
                                                            └ damaged: next older one

One of a version that the ledger does not know is *ahead*: the bus has lost the commits up to it.

Digests are verified, in the store while fetching.
"""

import asyncio
import dataclasses
import functools
import logging
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.local_store import Checkpoint
from penstock.services.trainer.checkpoint.remote_store import CheckpointStore, StoredCheckpoint
from penstock.services.trainer.checkpoint.signatures import UNSIGNED, Signer
from penstock.shared.backoff import Backoff
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.bus.stores.policy.ledger import JournalEntry, Ledger, RunStatus
from penstock.shared.errors import SettingsError, StoreError, WeightsError
from penstock.shared.process.telemetry import tell

log = logging.getLogger(__name__)

T = TypeVar("T")
Journal = tuple[tuple[JournalEntry, ...], ...]
"""Groups of each step after a checkpoint."""
_BACKOFF = Backoff(1.0, longest_s=30.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    place: str
    step: int
    reason: str

    def __str__(self) -> str:
        return f"the checkpoint of step {self.step} is damaged ({self.reason}; it is {self.place})"


@dataclasses.dataclass(frozen=True, slots=True)
class ResumeCandidate:
    checkpoint: Checkpoint | None
    stored: StoredCheckpoint | None
    """None: it was in the folder."""
    journal: Journal | None
    """None if incomplete."""
    damages: tuple[Damage, ...]
    """Newer checkpoints, newest first."""
    is_ahead: bool = False
    """Whether it is of a version that the ledger does not know."""


async def journal_after(ledger: Ledger, checkpoint: Checkpoint | None, status: RunStatus) -> Journal | None:
    """Return the groups of each step from the checkpoint to the ledger's step, or None if incomplete."""
    by_step: dict[int, list[JournalEntry]] = defaultdict(list)
    for entry in await ledger.journal(checkpoint.state.journal_entry if checkpoint is not None else ""):
        by_step[entry.step].append(entry)
    start = checkpoint.state.step if checkpoint is not None else 0
    steps = [step for step in sorted(by_step) if step > start]
    return tuple(tuple(by_step[step]) for step in steps) if steps == list(range(start + 1, status.step + 1)) else None


class Candidates:
    def __init__(
        self,
        bus: Bus,
        ledger: Ledger,
        store: CheckpointStore | None,
        root: Path,
        status: RunStatus | None,
        revoked: frozenset[PolicyVersion],
        signer: Signer = UNSIGNED,
        *,
        is_folder_new: bool = False,
    ) -> None:
        """``is_folder_new``: the run's folder knows no commit."""
        self._bus, self._ledger, self._store = bus, ledger, store
        self._is_folder_new = is_folder_new
        self._root, self._status, self._revoked = root, status, revoked
        self._signer = signer
        self._damages: list[Damage] = []
        self._places = frozenset[str]()
        """Of the checkpoints that the ledger names."""

    async def choose(self) -> ResumeCandidate:
        self._places = frozenset((await self._ledger.checkpoints()).values())
        local = await self._newest_of_folder()
        journal = await self._journal(local)
        newer = None
        is_folder_lost = local is None and self._is_folder_new and self._status is not None and self._status.step > 0
        if self._store is not None and (self._status is None or journal is None or is_folder_lost):
            newer = await self._newest_of_store(self._store, local)
        if newer is None:
            return self._choice(local, None, journal)
        checkpoint, stored = newer
        return self._choice(checkpoint, stored, await self._journal(checkpoint))

    def _choice(
        self, checkpoint: Checkpoint | None, stored: StoredCheckpoint | None, journal: Journal | None
    ) -> ResumeCandidate:
        least = -1 if checkpoint is None else checkpoint.state.step
        damages = (damage for damage in self._damages if damage.step >= least)
        damaged = tuple(sorted(damages, key=lambda damage: -damage.step))
        return ResumeCandidate(checkpoint, stored, journal, damaged, self._is_ahead(checkpoint))

    async def _journal(self, checkpoint: Checkpoint | None) -> Journal | None:
        if self._status is None or self._is_ahead(checkpoint):
            return ()
        return await journal_after(self._ledger, checkpoint, self._status)

    async def _newest_of_folder(self) -> Checkpoint | None:
        named = {where for v, where in (await self._ledger.checkpoints()).items() if v not in self._revoked}
        folders = {Path(where) for where in named if Path(where).parent == self._root}
        folders |= set(self._root.glob("step-*")) if self._root.is_dir() else set()
        steps = {folder: step for folder in folders if (step := local_store.step_of(folder)) is not None}
        read = [(local_store.read(folder), step, folder) for folder, step in steps.items()]
        for checkpoint, step, folder in sorted(read, key=lambda item: (not self._is_ahead(item[0]), -item[1])):
            if self._is_left(checkpoint, step):
                continue
            reason = await asyncio.to_thread(local_store.damage, folder, signer=self._signer)
            if not reason:
                return checkpoint
            remains = self._status is not None and str(folder) not in named
            if checkpoint is not None or not remains or (folder / local_store.MARKER).is_file():
                self._damages.append(damaged := Damage(str(folder), step, reason))
                await self._tell_damage("checkpoint refused", str(damaged))  # the older one waits for torch
        return None

    def _is_ahead(self, checkpoint: Checkpoint | StoredCheckpoint | None) -> bool:
        if self._status is None or checkpoint is None:
            return False
        if (str(checkpoint.folder) if isinstance(checkpoint, Checkpoint) else checkpoint.uri) in self._places:
            return False
        return self._status.newest_version is None or checkpoint.state.version > self._status.newest_version

    def _is_left(self, checkpoint: Checkpoint | StoredCheckpoint | None, step: int) -> bool:
        """Whether a checkpoint is of another branch than the ledger's."""
        if checkpoint is not None and checkpoint.state.version in self._revoked:
            return True
        return self._status is not None and step > self._status.step and not self._is_ahead(checkpoint)

    async def _newest_of_store(
        self, store: CheckpointStore, local: Checkpoint | None
    ) -> tuple[Checkpoint, StoredCheckpoint] | None:
        stored = await self._ask(store.whole)
        for name, why in sorted(store.unreadable.items()):
            reason = f"the manifest of {name} in {store.uri} is refused: {why}"
            self._damages.append(Damage(f"{store.uri}checkpoints/{name}", _step_in(name), reason))
            await self._tell_damage("stored checkpoint damaged", reason)
        for candidate in reversed(stored):
            if local is not None and local.state.version >= candidate.state.version:
                break
            if self._is_left(candidate, candidate.state.step):
                continue
            try:
                return await self._ask(functools.partial(store.fetch, candidate, self._root)), candidate
            except WeightsError as error:
                self._damages.append(Damage(candidate.uri, candidate.state.step, str(error)))
                await self._tell_damage("stored checkpoint damaged", str(error))
        return None

    async def _tell_damage(self, event: str, detail: str) -> None:
        await tell(self._bus, "trainer", event, f"{detail}: trying the next older one")

    async def _ask(self, work: Callable[[], T]) -> T:
        failures = 0
        while True:
            try:
                return await asyncio.to_thread(work)
            except StoreError as error:
                if error.denied:
                    raise SettingsError(
                        f"{error}: the run's folder alone does not say where to continue; change trainer.store or the "
                        f"credentials "
                        "in the environment"
                    ) from error
                failures += 1
                log.warning("waiting for object storage", extra={"error": str(error)})
                if failures == 1:
                    await tell(self._bus, "trainer", "waiting for object storage", str(error))
            await asyncio.sleep(_BACKOFF.wait_s(failures))


def _step_in(name: str) -> int:
    words = name.split("-")
    return int(words[1]) if len(words) > 1 and words[1].isdecimal() else 0
