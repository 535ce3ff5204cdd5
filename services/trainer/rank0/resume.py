"""Find where to continue: the newest intact checkpoint of the branch, and the journal after it. Rank 0 only.

::

    bus knows the run     newest intact checkpoint ──▶ the journal holds every step after it: these are replayed
                                                  └──▶ it does not: the run is rolled back to the checkpoint's version
    bus is empty, or older than the newest intact checkpoint ──▶ the ledger is restored from it; groups in flight count
                                                                 as lost
    neither               the initial policy

Commits that the bus lost and no checkpoint holds are counted (``Rewound``). Numbers of their versions are not used
again: a replica that has one would not pull another of that number.

Checkpoints of revoked versions are deleted, during a rollback only once its own was found intact; damaged ones are
renamed to ``damaged-step-…``. If no checkpoint is intact, the start is refused without changes. A rollback is abandoned
if its checkpoint is damaged or killed the trainer ``MOST_LOADS`` times.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.candidates import Candidates, Damage, Journal, ResumeCandidate, journal_after
from penstock.services.trainer.checkpoint.commits import Commits, note_lost, noted_version, read_commits
from penstock.services.trainer.checkpoint.local_store import Checkpoint
from penstock.services.trainer.checkpoint.manifests import CheckpointState
from penstock.services.trainer.checkpoint.remote_store import CheckpointStore, StoredCheckpoint, version_in
from penstock.services.trainer.checkpoint.signatures import open_signer
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.bus.stores.policy.ledger import CANNOT_CONTINUE, ENDED, Ledger, Rewound, RunState, RunStatus
from penstock.shared.bus.stores.policy.rollback import (
    Stage,
    begin_rollback,
    count_load,
    current_rollback,
    steer_rollback,
)
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.errors import SettingsError, StoreError
from penstock.shared.files.checkpoint_folder import CHECKPOINTS
from penstock.shared.process.telemetry import tell
from penstock.shared.settings import Settings

log = logging.getLogger(__name__)

MOST_LOADS = 3
"""Per rollback; less than the consecutive deaths that ``up`` allows."""
_UNKNOWN_VERSIONS = 100_000
"""Skipped if bus and folder were lost together."""
_LOOK_S = 0.2
_PAUSED_BEFORE = "; the run was paused before: "


@dataclasses.dataclass(frozen=True, slots=True)
class ResumePoint:
    checkpoint: Checkpoint | None
    journal: Journal
    status: RunStatus
    stored: StoredCheckpoint | None = None
    went_back: bool = False
    """Whether the run was rolled back, which ended the trainer's epoch."""
    stranded: bool = False
    """Whether a rollback's checkpoint is damaged, or the run has ended."""
    restored: bool = False
    """Whether the ledger was restored from the checkpoint: what was in flight on the bus before is gone."""


async def find_resume(
    bus: Bus, ledger: Ledger, live: Live, settings: Settings, store: CheckpointStore | None = None
) -> ResumePoint:
    """Return from where the run continues; restores a lost ledger."""
    folder, root = settings.run_folder, settings.run_folder / CHECKPOINTS
    known = await ledger.is_known()
    revoked = await ledger.revoked()
    await _follow_folder(ledger, root)
    rollback = await current_rollback(bus)
    may_strand = rollback is not None and (rollback.stage is Stage.LOADING or rollback.strands)
    if not may_strand:
        await _delete_revoked(ledger, root, revoked, store)
    local_store.clear_unfinished(root)
    status = await ledger.status()
    known_status, signer, commits = status if known else None, open_signer(settings), read_commits(folder)
    candidates = Candidates(
        bus, ledger, store, root, known_status, revoked, signer, is_folder_new=not (commits.kept or commits.lost)
    )
    choice = await candidates.choose()
    checkpoint, journal, restores = choice.checkpoint, choice.journal, not known or choice.is_ahead
    if may_strand and checkpoint is not None and journal is not None:
        # Not earlier: without the target, the others are all there is.
        await _delete_revoked(ledger, root, revoked, store)
    if choice.damages and checkpoint is None and not known:
        raise SettingsError(await _pause(bus, ledger, _no_checkpoint(choice.damages)))
    if checkpoint is not None or journal is not None:
        kept = status.newest_version if not restores else None if checkpoint is None else checkpoint.state.version
        await _count_lost(bus, ledger, folder, kept, commits)
        if not restores and commits.newest > (status.newest_version or 0):
            await ledger.skip_versions(max(commits.newest, noted_version(folder)), status.tip)
            status = await ledger.status()
    if journal is None:
        return await _go_back(bus, ledger, settings, choice)
    if restores and (checkpoint is not None or noted_version(folder)):
        await _restore(bus, ledger, live, checkpoint, folder, store, is_known=known)
        status = await ledger.status()
        journal = await journal_after(ledger, checkpoint, status) or ()
    status = await _unpause(ledger, status)
    await _report_damage(bus, ledger, choice, _lost(choice) if restores else "nothing is lost")
    await _tell_replay(bus, checkpoint, journal)
    return ResumePoint(checkpoint, journal, status, choice.stored, restored=restores)


async def _count_lost(bus: Bus, ledger: Ledger, folder: Path, kept: PolicyVersion | None, before: Commits) -> None:
    """Have the bus know how many acknowledged steps it has lost in all, and report those of versions after ``kept``."""
    commits = note_lost(folder, kept)
    steps = sorted({commit.step for commit in commits.newly_lost if commit.groups})
    if not steps:
        return
    groups = sum(commit.groups for commit in commits.newly_lost)
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    detail = (
        f"the bus came back with older data, without {which} that it had acknowledged ({groups} groups), and no checkpoint "
        "holds them: they are trained again. A failover to a replica that is behind, a restored backup or a cut "
        "append-only file does this (docs/operations.md#penstockbusrewound)"
    )
    trained = [commit for commit in commits.lost if commit.groups]
    await ledger.note_rewound(Rewound(len(trained), sum(c.groups for c in trained), commits.lost_at_s, detail))
    if commits.newly_lost != before.newly_lost:
        log.warning("bus lost steps", extra={"detail": detail})
        await tell(bus, "trainer", "bus lost steps", detail, steps=len(steps), groups=groups)


async def _follow_folder(ledger: Ledger, root: Path) -> None:
    """Have the ledger name the checkpoints in ``root``: the run's folder may have been moved, or be reached by a link."""
    for version, where in (await ledger.checkpoints()).items():
        if "://" not in where and Path(where).parent != root:
            await ledger.set_checkpoint(version, str(root / Path(where).name))


async def _delete_revoked(
    ledger: Ledger, root: Path, revoked: frozenset[PolicyVersion], store: CheckpointStore | None
) -> None:
    """Delete the checkpoints of ``revoked`` versions, also stored ones: after a loss of the bus they would count again."""
    for on_disk in local_store.find(root):
        if on_disk.state.version in revoked and await ledger.forget_checkpoint(str(on_disk.folder)):
            local_store.delete(on_disk)
    if store is None or not revoked:
        return
    try:
        for stored in await asyncio.to_thread(store.whole):
            if stored.state.version in revoked and await ledger.forget_checkpoint(stored.uri):
                await asyncio.to_thread(store.delete, stored)
    except StoreError as error:
        log.warning("stored checkpoints of revoked versions stay until the next upload", extra={"error": str(error)})


async def may_load(bus: Bus, checkpoint: Checkpoint) -> bool:
    """Whether ``checkpoint`` can be tried; a rollback's has limited tries."""
    target, state, unloadable = await _rollback(bus)
    if target not in await _versions_of(Ledger(bus), checkpoint) or (state != "loading" and not unloadable):
        return True
    if not unloadable and await count_load(bus) <= MOST_LOADS:
        return True
    await _give_up(
        bus,
        f"the trainer ended {MOST_LOADS} times while it loaded the checkpoint {checkpoint.folder}: it is "
        "larger than this machine's memory, or not what this trainer can read (see its log); roll back to another "
        "version, or "
        "repair it and roll back to this one again",
    )
    return False


async def _versions_of(ledger: Ledger, checkpoint: Checkpoint) -> set[str]:
    """Return the versions with the weights of ``checkpoint``: its own, and those published after starts from it."""
    own, folder = checkpoint.state.version, str(checkpoint.folder)
    known = await ledger.checkpoints()
    return {str(own), *(str(v) for v, where in known.items() if where == folder or version_in(where) == own)}


async def _rollback(bus: Bus) -> tuple[str, str, str]:
    rollback = await current_rollback(bus)
    return ("", "", "") if rollback is None else (str(rollback.target), rollback.stage, rollback.unloadable)


async def _give_up(bus: Bus, sentence: str) -> None:
    """Have the coordinator end the rollback, as its checkpoint cannot be loaded."""
    log.error("checkpoint given up", extra={"detail": sentence})
    if (rollback := await current_rollback(bus)) is not None:
        await steer_rollback(bus, rollback.id, unloadable=sentence)


async def _go_back(bus: Bus, ledger: Ledger, settings: Settings, choice: ResumeCandidate) -> ResumePoint:
    while True:
        _, state, unloadable = await _rollback(bus)
        status = await ledger.status()
        if choice.damages and (state in ("loading", "pulling") or (state == "failed" and unloadable)):
            await _give_up(
                bus, f"{choice.damages[0]}: roll back to another version, or repair it and roll back to this one again"
            )
            return ResumePoint(None, (), status, stranded=True)
        if status.state is RunState.STOPPED or (status.state in ENDED and status.step >= settings.run.steps):
            return ResumePoint(None, (), status, stranded=True)
        target = await _target(ledger, choice)
        if choice.checkpoint is None and choice.damages:
            raise SettingsError(await _pause(bus, ledger, _no_checkpoint(choice.damages)))
        if target is None or choice.checkpoint is None or status.state is RunState.CREATED:
            sentence = await _no_journal(ledger, choice.checkpoint, status, settings)
            raise SettingsError(await _pause(bus, ledger, sentence))
        status = await _unpause(ledger, status)
        lost = _lost(choice, status.step)
        answer = await begin_rollback(bus, ledger, status, target, f"{_why(choice)}: {lost}")
        if answer == "ok":
            await _report_damage(bus, ledger, choice, lost)
            return ResumePoint(choice.checkpoint, (), await ledger.status(), choice.stored, went_back=True)
        await asyncio.sleep(_LOOK_S)  # moved, or to be reopened by the coordinator


async def _target(ledger: Ledger, choice: ResumeCandidate) -> PolicyRecord | None:
    if choice.checkpoint is None:
        return None
    known, revoked = await ledger.checkpoints(), await ledger.revoked()
    folder = str(choice.checkpoint.folder)
    places = {folder, choice.stored.uri if choice.stored is not None else folder}
    versions = {version for version, where in known.items() if where in places} | {choice.checkpoint.state.version}
    usable = await ledger.records(sorted(versions - revoked))
    if not usable:
        return None
    target = max(usable, key=lambda record: record.version)
    if target.version not in known:
        await ledger.set_checkpoint(target.version, choice.stored.uri if choice.stored is not None else folder)
    return target


def _why(choice: ResumeCandidate) -> str:
    return "; ".join(map(str, choice.damages)) or "the journal does not hold the steps after its checkpoint"


def _lost(choice: ResumeCandidate, step: int | None = None) -> str:
    start = 0 if choice.checkpoint is None else choice.checkpoint.state.step
    end = max((damage.step for damage in choice.damages), default=start) if step is None else step
    return f"steps {start + 1} to {end} are trained again" if end > start else "nothing is lost"


async def _report_damage(bus: Bus, ledger: Ledger, choice: ResumeCandidate, lost: str) -> None:
    start = 0 if choice.checkpoint is None else choice.checkpoint.state.step
    for damage in choice.damages:
        if choice.checkpoint is not None and damage.place == str(choice.checkpoint.folder):
            aside = f" and was replaced by the copy in {choice.stored.uri}" if choice.stored is not None else ""
        else:
            await ledger.drop_checkpoint(damage.place)
            aside = await asyncio.to_thread(_set_aside, damage)
        detail = f"{damage}{aside}; continuing from the checkpoint of step {start}: {lost}"
        log.warning("checkpoint damaged", extra={"detail": detail})
        await tell(bus, "trainer", "checkpoint damaged", detail, step=damage.step, resumed_step=start)


def _set_aside(damage: Damage) -> str:
    folder = Path(damage.place)
    if not folder.is_dir():
        return ""
    try:
        return f" and was renamed to {local_store.set_aside(folder).name}, which may be deleted"
    except OSError as error:
        return f" and could not be renamed ({error.strerror})"


async def _pause(bus: Bus, ledger: Ledger, sentence: str) -> str:
    """Pause the run until a trainer can continue it; return the reason."""
    status = await ledger.status()
    if not status.reason.startswith(sentence):
        _, mark, before = status.reason.partition(_PAUSED_BEFORE)
        if status.state is RunState.PAUSED and not status.reason.startswith(CANNOT_CONTINUE):
            mark, before = _PAUSED_BEFORE, status.reason
        await ledger.transition(RunState.PAUSED, f"{sentence}{mark}{before}", [RunState.RUNNING, RunState.PAUSED])
        await tell(bus, "trainer", "resume refused", sentence)
    return sentence


async def _unpause(ledger: Ledger, status: RunStatus) -> RunStatus:
    """Undo :func:`_pause`."""
    if status.state is RunState.PAUSED and status.reason.startswith(CANNOT_CONTINUE):
        _, mark, before = status.reason.partition(_PAUSED_BEFORE)
        state, reason = (RunState.PAUSED, before) if mark else (RunState.RUNNING, "its checkpoints were put back")
        await ledger.transition(state, reason, [RunState.PAUSED])
    return await ledger.status()


def _no_checkpoint(damages: Sequence[Damage]) -> str:
    listed = "; ".join(map(str, damages))
    return (
        f"{CANNOT_CONTINUE}no checkpoint is intact: {listed}: put an intact copy in its place and resume again, or "
        "start a new run with policy.model set to what `penstock export` can still write of this one"
    )


async def _no_journal(ledger: Ledger, checkpoint: Checkpoint | None, status: RunStatus, settings: Settings) -> str:
    start = checkpoint.state.step if checkpoint is not None else 0
    entries = await ledger.journal(checkpoint.state.journal_entry if checkpoint is not None else "")
    steps = sorted({entry.step for entry in entries if entry.step > start})
    places = " and ".join(filter(None, (str(settings.run_folder), settings.trainer.store.uri)))
    return (
        f"{CANNOT_CONTINUE}expected the journal to hold steps {start + 1} to {status.step} after the newest checkpoint, found "
        f"{steps}, in {places}: put its checkpoints back, or start a new run with policy.model set to what "
        "`penstock export` can still write of this one"
    )


async def _restore(
    bus: Bus,
    ledger: Ledger,
    live: Live,
    checkpoint: Checkpoint | None,
    folder: Path,
    store: CheckpointStore | None,
    *,
    is_known: bool,
) -> None:
    """Restore the ledger; its step last, by which a successor knows that nothing is missing."""
    noted = noted_version(folder)
    if checkpoint is None:
        await ledger.restore(0, 0, 0, noted, {}, (0.0, 0.0))
        detail = "the bus was empty, before the first checkpoint; continuing from the initial policy"
        await tell(bus, "trainer", "run restored", detail, step=0, cursor=0, position=0)
        return
    state = checkpoint.state
    newest_version = noted if noted >= state.version else PolicyVersion(state.version + _UNKNOWN_VERSIONS)
    position = state.cursor if state.position is None else state.position
    gpu_time = (state.gpu_s, state.gpu_until_s)
    await live.restore(state.settings_revision, state.live_values)
    await _restore_checkpoints(ledger, state, folder / CHECKPOINTS, store)
    await ledger.restore(
        state.step, state.cursor, position, newest_version, state.counts, gpu_time, state.version, state.journal_entry,
        is_known=is_known,
    )  # fmt: skip
    was = "was older than the newest checkpoint" if is_known else "was empty"
    detail = f"the bus {was}; continuing from the checkpoint of step {state.step}"
    await tell(bus, "trainer", "run restored", detail, step=state.step, cursor=state.cursor, position=position)


async def _restore_checkpoints(
    ledger: Ledger, state: CheckpointState, root: Path, store: CheckpointStore | None
) -> None:
    """Have the ledger know the checkpoints that are there, so that pinned ones are kept and all can be rolled back to."""
    made = {}
    for on_disk in local_store.find(root):
        made[on_disk.state.version] = (on_disk.state, (on_disk.folder / local_store.MARKER).stat().st_mtime)
        await ledger.set_checkpoint(on_disk.state.version, str(on_disk.folder))
    try:
        stored = await asyncio.to_thread(store.whole) if store is not None else []
    except StoreError as error:
        log.warning("stored checkpoints are not known", extra={"error": str(error)})
        stored = []
    for copy in stored:
        made[copy.state.version] = (copy.state, copy.stored_at_s)
        await ledger.set_checkpoint(copy.state.version, copy.uri)
    for version, place in (await ledger.checkpoints()).items():
        if version not in made and "://" not in place:
            await ledger.drop_checkpoint(place)  # of an older bus: retention has deleted it since
    await _restore_policies(ledger, [of for version, of in sorted(made.items()) if version <= state.version])
    for version in state.pins:
        await ledger.pin(version, pinned=True)
    for version in state.released:
        await ledger.release(version, released=True)


async def _restore_policies(ledger: Ledger, made: Sequence[tuple[CheckpointState, float]]) -> None:
    """Have the ledger know the versions of checkpoints, oldest first, each a child of the one before."""
    parent = None
    for state, made_at_s in made:
        record = PolicyRecord(
            state.version, parent, state.step, made_at_s, "", "", settings_revision=state.settings_revision
        )
        position = state.cursor if state.position is None else state.position
        await ledger.restore_policy(record, state.counts.get("trained", 0), position)
        parent = state.version


async def _tell_replay(bus: Bus, checkpoint: Checkpoint | None, journal: Journal) -> None:
    if journal:
        start, end = checkpoint.state.step if checkpoint is not None else 0, journal[-1][0].step
        detail = f"replaying {len(journal)} steps from the journal after the checkpoint of step {start}"
        await tell(bus, "trainer", "journal replayed", detail, start=start, end=end)
