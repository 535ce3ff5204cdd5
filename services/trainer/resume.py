"""Find out from where a trainer goes on: the newest whole checkpoint of the ledger's branch, and the journal behind it.

::

    bus knows the run     newest checkpoint at most at its step ──▶ journal, step by step, up to its step
    bus is empty          newest checkpoint ──▶ the ledger is restored from it; what was in flight is counted as lost
    neither               the initial policy

Checkpoints of revoked versions are deleted first: a rollback left their branch. Nothing is loaded here; rank 0 only.
"""

import dataclasses
from collections import defaultdict
from pathlib import Path

from services.trainer import checkpoints
from services.trainer.checkpoints import Checkpoint
from services.trainer.publication import noted_version
from shared.bus import Bus
from shared.ledger import JournalEntry, Ledger, RunStatus
from shared.live import Live
from shared.settings import Settings
from shared.telemetry import tell


@dataclasses.dataclass(frozen=True, slots=True)
class Resume:
    """From where to go on."""

    checkpoint: Checkpoint | None
    journal: tuple[tuple[JournalEntry, ...], ...]
    """The groups of each step after the checkpoint."""
    status: RunStatus


async def find_resume(bus: Bus, ledger: Ledger, live: Live, settings: Settings) -> Resume:
    """Return from where the run goes on; restores the ledger of a run whose bus was lost.

    Raises:
        RuntimeError: steps between the checkpoint and the ledger are in no journal.
    """
    root = settings.run_folder / "checkpoints"
    known = await bus.call(lambda: bus.client.hexists(bus.keys.run, "step"))
    revoked = await ledger.revoked()
    for found in checkpoints.find(root):
        if found.state.version in revoked and await ledger.forget_checkpoint(str(found.folder)):
            checkpoints.delete(found)
    status = await ledger.status()
    checkpoint = checkpoints.newest(root, status.step if known else None, revoked)
    if checkpoint is not None and not known:
        await _restore(bus, ledger, live, checkpoint, settings.run_folder)
        status = await ledger.status()
    return Resume(checkpoint, await _journal(bus, ledger, checkpoint, status, settings.run_folder), status)


async def _restore(bus: Bus, ledger: Ledger, live: Live, checkpoint: Checkpoint, folder: Path) -> None:
    state = checkpoint.state
    newest_version = max(state.version, noted_version(folder))
    position = state.cursor if state.position is None else state.position
    await ledger.restore(state.step, state.cursor, position, newest_version, state.counts)
    await live.restore(state.settings_revision, state.live_values)
    detail = f"the bus was empty; going on from the checkpoint of step {state.step}"
    await tell(bus, "trainer", "run restored", detail, step=state.step, cursor=state.cursor, position=position)


async def _journal(
    bus: Bus, ledger: Ledger, checkpoint: Checkpoint | None, status: RunStatus, folder: Path
) -> tuple[tuple[JournalEntry, ...], ...]:
    entries = await ledger.journal(checkpoint.state.journal_entry if checkpoint is not None else "")
    start = checkpoint.state.step if checkpoint is not None else 0
    by_step: dict[int, list[JournalEntry]] = defaultdict(list)
    for entry in entries:
        by_step[entry.step].append(entry)
    steps = [step for step in sorted(by_step) if step > start]
    if steps != list(range(start + 1, status.step + 1)):
        raise RuntimeError(
            f"expected the journal to hold steps {start + 1} to {status.step} after the newest checkpoint, found "
            f"{steps}: the run cannot be continued from {folder}; start a new one from its policy"
        )
    if steps:
        detail = f"replaying {len(steps)} steps from the journal after the checkpoint of step {start}"
        await tell(bus, "trainer", "journal replayed", detail, start=start, end=status.step)
    return tuple(tuple(by_step[step]) for step in steps)
