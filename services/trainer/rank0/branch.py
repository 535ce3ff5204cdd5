"""The branch of the run's history that this trainer continues: its epoch, the newest version, and what each version's step was.

The ledger takes versions of one epoch alone. Starting a trainer takes the next one, and so do the ranks when a rollback ended
theirs: they go on from the version that the ledger went back to. What another trainer's epoch ended is over for this one.

Rank 0 only. It knows no commands.
"""

import time
from collections.abc import Sequence

from services.trainer.batch.staleness import lag_steps
from services.trainer.rank0.results import Published
from shared.bus.bus import Bus, Delivery
from shared.bus.messages import Experience, PolicyRecord, PolicyVersion, StepPlan, StepReport
from shared.bus.stores.ledger import Ledger, RunStatus
from shared.errors import Fenced


class Branch:
    """The end of the history, to which this trainer adds. It lives on the event loop."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._ledger = Ledger(bus)
        self._epoch = 0
        self.newest: PolicyVersion | None = None
        """The newest version of the run, of any branch; the next one has the next number."""
        self.tip: PolicyVersion | None = None
        """The parent of the next version: the newest one, or the one that a rollback went back to."""
        self.revision = 0
        """Under which revision of the live settings the newest step was made."""
        self.steps: dict[PolicyVersion, int] = {}
        """How many steps were committed with each version."""

    async def take_epoch(self) -> None:
        """Shut out every trainer before this one, and itself from before a rollback."""
        self._epoch = await self._ledger.take_epoch()

    async def follow(self, status: RunStatus) -> None:
        """Learn where ``status`` stands."""
        records = await self._ledger.policies()
        self.steps.update((record.version, record.step) for record in records)
        self.newest, self.tip = status.newest_version, status.tip
        self.revision = max((record.settings_revision for record in records), default=0)

    async def was_left(self) -> bool:
        """Whether a rollback, not another trainer, ended our epoch."""
        found = await self._bus.call(
            lambda: self._bus.client.hmget(self._bus.keys.run, ["trainer_epoch", "rollback_epoch"])
        )
        epoch, rollback_epoch = (int(value or 0) for value in found)
        return epoch != self._epoch and epoch == rollback_epoch

    def next_version(self) -> PolicyVersion:
        """Return the number that the next version has."""
        return PolicyVersion(0 if self.newest is None else self.newest + 1)

    def record(self, step: int, published: Published, metrics: dict[str, float]) -> PolicyRecord:
        """Return the record of the next version, whose weights are those of ``step``."""
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
        )

    async def newest_of(self, step: int) -> PolicyRecord | None:
        """Return the newest version's record if its weights are those of ``step``; after a rollback an older version's are."""
        record = None if self.newest is None else await self._ledger.policy(self.newest)
        return record if record is not None and record.step == step and self.tip == self.newest else None

    async def commit(
        self,
        record: PolicyRecord,
        deliveries: Sequence[Delivery[Experience]],
        report: StepReport | None,
        plan: StepPlan | None = None,
    ) -> bool:
        """Add ``record``, and what its step was made of and how, in one transaction; False, and nothing, when the branch was left.

        Raises:
            Fenced: another trainer took over.
        """
        try:
            await self._ledger.commit(self._epoch, record, deliveries, report, plan)
        except Fenced:
            if not await self.was_left():
                raise
            return False
        self.newest = self.tip = record.version
        self.steps[record.version] = record.step
        return True

    def lags(self, groups: Sequence[Experience], step: int) -> tuple[int, ...]:
        """Return each group's lag when ``step`` steps are committed: the same in a replay, as versions keep their steps."""
        return tuple(lag_steps(found.group, step, self.steps) for found in groups)
