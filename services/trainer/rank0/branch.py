"""The branch of the run's history that this trainer continues.

The ledger accepts versions of one epoch only. A trainer takes the next epoch at its start and after a rollback; an
epoch that another trainer ended is final.
"""

import time
from collections.abc import Sequence

from penstock.services.trainer.rank0.mailbox.results import Published
from penstock.shared.bus.bus import Bus, Delivery
from penstock.shared.bus.messages import Experience, PolicyRecord, PolicyVersion, StepPlan, StepReport
from penstock.shared.bus.stores.experience.signals import SignalChange
from penstock.shared.bus.stores.policy.ledger import Ledger, RunStatus
from penstock.shared.errors import Fenced


class TakenOver(Fenced):
    """Another trainer has taken this one's place."""


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
        for version in [version for version in self.steps if status.tip is None or version > status.tip]:
            del self.steps[version]  # the bus may have lost it
        self.steps.update((record.version, record.step) for record in records)
        self.newest, self.tip = status.newest_version, status.tip
        self.revision = max((record.settings_revision for record in records), default=0)

    async def was_left(self) -> bool:
        """Whether a rollback, or the bus's loss of its data, ended our epoch. Raises TakenOver: another trainer did."""
        epoch, rollback_epoch = await self._ledger.epochs()
        if epoch > self._epoch and epoch != rollback_epoch:
            raise TakenOver(
                f"another trainer has taken over (epoch {epoch}, this one's was {self._epoch}): this one ends, and if started "
                "again waits for the end of the other"
            )
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

    async def has(self, version: PolicyVersion) -> bool:
        """Whether the ledger has a version that we committed: a rollback, or a loss of the bus's data, may have taken it."""
        newest = (await self._ledger.status()).newest_version
        return newest is not None and newest >= version and version not in await self._ledger.revoked()

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
        Raises Fenced: another trainer took over, or the ledger is not as it was left.
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
