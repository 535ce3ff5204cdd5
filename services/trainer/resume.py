"""Find out from where a trainer goes on: the newest whole checkpoint of the ledger's branch, and the journal behind it.

::

    bus knows the run     newest checkpoint at most at its step ──▶ journal, step by step, up to its step
    bus is empty          newest checkpoint ──▶ the ledger is restored from it; what was in flight is counted as lost
    neither               the initial policy

With object storage (``trainer.store``) a checkpoint is taken from the run's folder where that and the journal are enough, so a start does not
need the store; on a new machine it is fetched. One that is damaged there is told of, and the next older one is taken: the journal
reaches back to that. While the store does not answer and nothing else will do, the start waits; what only a person can change refuses it.

Checkpoints of revoked versions are deleted first: a rollback left their branch. One that a rollback goes back to and that the trainer died of
``MOST_LOADS`` times is not tried again (:func:`may_load`): the coordinator ends the rollback. Nothing is loaded here; rank 0 only.
"""

import asyncio
import dataclasses
import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from services.trainer import checkpoints
from services.trainer.checkpoints import Checkpoint
from services.trainer.publication import noted_version
from services.trainer.stored import CheckpointStore, StoredCheckpoint
from shared.bus import Bus
from shared.errors import SettingsError, StoreError, WeightsError
from shared.ledger import JournalEntry, Ledger, RunStatus
from shared.live import Live
from shared.messages import PolicyVersion
from shared.settings import Settings
from shared.telemetry import tell

log = logging.getLogger(__name__)

T = TypeVar("T")
Journal = tuple[tuple[JournalEntry, ...], ...]
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
MOST_LOADS = 3
"""So often the trainer begins to load the checkpoint of one rollback: less than ``up`` lets a process die in a row."""
_UNKNOWN_VERSIONS = 100_000
"""So many numbers of versions are passed over where bus and folder were lost together, and with them the newest one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resume:
    """From where to go on."""

    checkpoint: Checkpoint | None
    journal: Journal
    """The groups of each step after the checkpoint."""
    status: RunStatus
    stored: StoredCheckpoint | None = None
    """Where the checkpoint was fetched from, if it was."""


async def find_resume(
    bus: Bus, ledger: Ledger, live: Live, settings: Settings, store: CheckpointStore | None = None
) -> Resume:
    """Return from where the run goes on; restores the ledger of a run whose bus was lost.

    Raises:
        RuntimeError: steps between the checkpoint and the ledger are in no journal.
        SettingsError: object storage is needed, and denies access.
    """
    root = settings.run_folder / "checkpoints"
    known = await bus.call(lambda: bus.client.hexists(bus.keys.run, "step"))
    revoked = await ledger.revoked()
    for found in checkpoints.find(root):
        if found.state.version in revoked and await ledger.forget_checkpoint(str(found.folder)):
            checkpoints.delete(found)
    status = await ledger.status()
    checkpoint = checkpoints.newest(root, status.step if known else None, revoked)
    journal = await _journal(ledger, checkpoint, status)
    stored = None
    if store is not None and (not known or journal is None):
        chosen = _Chosen(bus, ledger, store, root, status if known else None, revoked)
        checkpoint, stored, journal = await chosen.find(checkpoint)
    if checkpoint is not None and not known:
        await _restore(bus, ledger, live, checkpoint, settings.run_folder)
        status = await ledger.status()
        journal = await _journal(ledger, checkpoint, status)
    if journal is None:
        raise RuntimeError(await _refusal(ledger, checkpoint, status, settings))
    await _tell_replay(bus, checkpoint, journal)
    return Resume(checkpoint, journal, status, stored)


async def may_load(bus: Bus, checkpoint: Checkpoint) -> bool:
    """Whether ``checkpoint`` can be tried; counts it where a rollback waits for it, and says there, at last, that it cannot be loaded."""
    key = bus.keys.rollback
    found = await bus.call(lambda: bus.client.hmget(key, ["id", "target", "state", "unloadable"]))
    rollback, target, state, unloadable = (None if value is None else value.decode() for value in found)
    if target != str(checkpoint.state.version) or (state != "loading" and not unloadable):
        return True
    if not unloadable and int(await bus.write(key, "HINCRBY", "loads", 1)) <= MOST_LOADS:
        return True
    sentence = (
        f"expected the checkpoint {checkpoint.folder} to load, found that the trainer ended {MOST_LOADS} times in it: it is damaged, or "
        "larger than this machine's memory (see the trainer's log); roll back to another version, or mend it and roll back to this one again"
    )
    log.error("checkpoint given up", extra={"detail": sentence})
    await bus.script("steer_rollback", [key], [rollback or "", time.time(), "unloadable", sentence])
    return False


class _Chosen:
    """The choice among the checkpoint of the folder and those of the store; ``status`` is None where the bus was lost."""

    def __init__(
        self,
        bus: Bus,
        ledger: Ledger,
        store: CheckpointStore,
        root: Path,
        status: RunStatus | None,
        revoked: frozenset[PolicyVersion],
    ) -> None:
        self._bus, self._ledger, self._store = bus, ledger, store
        self._root, self._status, self._revoked = root, status, revoked

    async def find(self, local: Checkpoint | None) -> tuple[Checkpoint | None, StoredCheckpoint | None, Journal | None]:
        """Return the newest checkpoint that can be read, where it was fetched from, and its journal (None: not whole)."""
        stored = [one for one in await self._ask(self._store.whole) if one.state.version not in self._revoked]
        damaged = sorted(self._store.unreadable)
        for name in damaged:
            await self._tell_damage(f"the manifest of {name} in {self._store.uri} is not what was written")
        for one in reversed(stored):
            if local is not None and local.state.version >= one.state.version:
                break
            journal = await self._journal_after(one)
            if self._status is not None and journal is None:
                continue
            try:
                return await self._ask(functools.partial(self._store.fetch, one, self._root)), one, journal
            except WeightsError as error:
                damaged.append(one.name)
                await self._tell_damage(str(error))
        if damaged and local is None and self._status is None:
            raise RuntimeError(
                f"expected a checkpoint of this run in {self._store.uri} that can be read, found {', '.join(damaged)}: the bus "
                "knows nothing of the run either; start a new one under another run.id"
            )
        if self._status is None:
            return local, None, ()
        return local, None, await _journal(self._ledger, local, self._status)

    async def _journal_after(self, one: StoredCheckpoint) -> Journal | None:
        if self._status is None or one.state.step > self._status.step:
            return None
        return await _journal(self._ledger, Checkpoint(self._root, one.state), self._status)

    async def _tell_damage(self, detail: str) -> None:
        await tell(self._bus, "trainer", "stored checkpoint damaged", f"{detail}: the next older one is tried")

    async def _ask(self, work: Callable[[], T]) -> T:
        """Return what the store answers, as soon as it does."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await asyncio.to_thread(work)
            except StoreError as error:
                if error.denied:
                    raise SettingsError(
                        f"{error}: the run's folder alone does not say where to go on; change trainer.store or the credentials "
                        "in the environment"
                    ) from error
                log.warning("waiting for object storage", extra={"error": str(error)})
                if pause_s == _FIRST_PAUSE_S:
                    await tell(self._bus, "trainer", "waiting for object storage", str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _restore(bus: Bus, ledger: Ledger, live: Live, checkpoint: Checkpoint, folder: Path) -> None:
    state = checkpoint.state
    noted = noted_version(folder)
    newest_version = noted if noted >= state.version else PolicyVersion(state.version + _UNKNOWN_VERSIONS)
    position = state.cursor if state.position is None else state.position
    await ledger.restore(state.step, state.cursor, position, newest_version, state.counts)
    await live.restore(state.settings_revision, state.live_values)
    detail = f"the bus was empty; going on from the checkpoint of step {state.step}"
    await tell(bus, "trainer", "run restored", detail, step=state.step, cursor=state.cursor, position=position)


async def _journal(ledger: Ledger, checkpoint: Checkpoint | None, status: RunStatus) -> Journal | None:
    """Return the groups of each step from the checkpoint to the ledger's step; None where the journal lacks one."""
    by_step: dict[int, list[JournalEntry]] = defaultdict(list)
    for entry in await ledger.journal(checkpoint.state.journal_entry if checkpoint is not None else ""):
        by_step[entry.step].append(entry)
    start = checkpoint.state.step if checkpoint is not None else 0
    steps = [step for step in sorted(by_step) if step > start]
    return tuple(tuple(by_step[step]) for step in steps) if steps == list(range(start + 1, status.step + 1)) else None


async def _refusal(ledger: Ledger, checkpoint: Checkpoint | None, status: RunStatus, settings: Settings) -> str:
    start = checkpoint.state.step if checkpoint is not None else 0
    entries = await ledger.journal(checkpoint.state.journal_entry if checkpoint is not None else "")
    steps = sorted({entry.step for entry in entries if entry.step > start})
    places = " and ".join(filter(None, (str(settings.run_folder), settings.trainer.store.uri)))
    return (
        f"expected the journal to hold steps {start + 1} to {status.step} after the newest checkpoint, found "
        f"{steps}: the run cannot be continued from {places}; start a new one from its policy"
    )


async def _tell_replay(bus: Bus, checkpoint: Checkpoint | None, journal: Sequence[Sequence[JournalEntry]]) -> None:
    if journal:
        start, end = checkpoint.state.step if checkpoint is not None else 0, journal[-1][0].step
        detail = f"replaying {len(journal)} steps from the journal after the checkpoint of step {start}"
        await tell(bus, "trainer", "journal replayed", detail, start=start, end=end)
