"""The branch of the run's history that this trainer continues.

The ledger accepts versions of one epoch only. A trainer takes the next epoch at its start and after a rollback; an
epoch that another trainer ended is final.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from services.trainer.rank0.mailbox.results import Published
from shared.bus.bus import Bus, Delivery
from shared.bus.messages import Experience, PolicyRecord, PolicyVersion, StepPlan, StepReport
from shared.bus.stores.experience.signals import SignalChange
from shared.bus.stores.policy.ledger import Ledger, RunStatus
from shared.errors import Fenced
from shared.files.durable import NO_ROOM, no_room, write_whole

log = logging.getLogger(__name__)

_AGAIN_S = 1.0
_NOTE = "newest_version"
_COMMITTED = "committed_version"


class Branch:
    """End of the history, to which this trainer adds; on the event loop."""

    def __init__(self, bus: Bus) -> None:
        self._ledger = Ledger(bus)
        self._epoch = 0
        self.newest: PolicyVersion | None = None
        """Of any branch; determines the next number."""
        self.tip: PolicyVersion | None = None
        """Parent of the next version: the newest one, or the target of a rollback."""
        self.revision = 0
        self.steps: dict[PolicyVersion, int] = {}

    async def take_epoch(self) -> None:
        """Fence off earlier trainers, and this one's state from before a rollback."""
        self._epoch = await self._ledger.take_epoch()

    async def follow(self, status: RunStatus) -> None:
        """Take the branch's state from ``status``."""
        records = await self._ledger.policies()
        self.steps.update((record.version, record.step) for record in records)
        self.newest, self.tip = status.newest_version, status.tip
        self.revision = max((record.settings_revision for record in records), default=0)

    async def was_left(self) -> bool:
        """Whether a rollback, or the bus's loss of its data, ended our epoch, and not another trainer."""
        epoch, rollback_epoch = await self._ledger.epochs()
        return epoch != self._epoch and epoch == rollback_epoch

    def is_ours(self, status: RunStatus, step: int) -> bool:
        """Whether ``status`` is of our epoch and as we left it after ``step`` steps."""
        return (status.trainer_epoch, status.step, status.newest_version) == (self._epoch, step, self.newest)

    def check(self, status: RunStatus, step: int) -> None:
        """Raise Fenced if the bus has lost what we committed last: epochs only grow."""
        if 0 < status.trainer_epoch <= self._epoch and not self.is_ours(status, step):
            raise Fenced(
                f"expected the bus at step {step} with version {self.newest}, found step {status.step} and version "
                f"{status.newest_version}: it has older data"
            )

    def next_version(self) -> PolicyVersion:
        return PolicyVersion(0 if self.newest is None else self.newest + 1)

    def record(
        self, step: int, published: Published, metrics: dict[str, float], traced: tuple[int, ...] = ()
    ) -> PolicyRecord:
        """Return the next version's record, with the weights of ``step``."""
        assert published.weights is not None
        return PolicyRecord(
            version=self.next_version(),
            parent=self.tip,
            step=step,
            created_at_s=time.time(),
            manifest_digest=published.weights.digest,
            location=published.weights.location,
            metrics=metrics,
            source=published.weights.source,
            probe=published.probe,
            settings_revision=self.revision,
            traced=traced,
        )

    async def newest_of(self, step: int) -> PolicyRecord | None:
        """Return the newest version's record if its weights are those of ``step``."""
        record = None if self.newest is None else await self._ledger.policy(self.newest)
        return record if record is not None and record.step == step and self.tip == self.newest else None

    async def commit(
        self,
        record: PolicyRecord,
        deliveries: Sequence[Delivery[Experience]],
        report: StepReport | None,
        plan: StepPlan | None = None,
        change: SignalChange | None = None,
    ) -> bool:
        """Commit ``record`` with its experience, plan and signals in one transaction; False, without change, after a rollback.

        Raises:
            Fenced: another trainer took over.
        """
        try:
            await self._ledger.commit(self._epoch, record, deliveries, report, plan, change)
        except Fenced:
            if not await self.was_left():
                raise
            return False
        self.newest = self.tip = record.version
        self.steps[record.version] = record.step
        return True

    def lags(self, groups: Sequence[Experience], step: int) -> dict[PolicyVersion, int]:
        """Return the lag of each version in the groups after ``step`` steps, reproducibly."""
        versions = sorted({version for experience in groups for version in experience.group.versions})
        return {version: step - self.steps.get(version, 0) for version in versions}


def note_version(folder: Path, version: PolicyVersion) -> None:
    """Record a version's number in the run's folder before its commit, so that a lost bus cannot cause its reuse.

    Waits while the disk is full.
    """
    if version < noted_version(folder):
        return  # written by a trainer that replaced us
    said = False
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / _NOTE, str(int(version)))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if not said:
                log.warning("training waits for disk space", extra={"reason": no_room(folder / _NOTE, error)})
            said = True
            time.sleep(_AGAIN_S)
        else:
            return


def note_committed(folder: Path, version: PolicyVersion) -> None:
    """Record that a version was committed, by which a successor knows that the bus lost it."""
    with contextlib.suppress(OSError):  # a full disk: the number before stays
        write_whole(folder / _COMMITTED, str(int(version)))


def committed_version(folder: Path) -> PolicyVersion:
    """Return the last version recorded as committed, or 0."""
    return _read(folder / _COMMITTED)


def noted_version(folder: Path) -> PolicyVersion:
    """Return the largest recorded number, or 0."""
    return _read(folder / _NOTE)


def _read(note: Path) -> PolicyVersion:
    try:
        return PolicyVersion(int(note.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return PolicyVersion(0)
