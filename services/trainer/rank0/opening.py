"""The orders that bring every rank to where the ledger stands: at the start, and again after each rollback.

::

    take the epoch ──▶ find from where to go on (``resume``) ──▶ LOAD the checkpoint ──▶ REPLAY of each step in the journal
                        └ WAIT every few seconds, as a checkpoint may have to be fetched first

Where the checkpoint of a rollback cannot be loaded there is nothing to go on from: no order but WAIT, until another rollback.

Rank 0 only, on the training thread; it finds out on the event loop of the bus.
"""

import asyncio
import concurrent.futures
import logging
from collections.abc import Iterator, Sequence

from services.trainer.checkpoint.local_store import Checkpoint
from services.trainer.rank0.branch import Branch
from services.trainer.rank0.commands import TURN_S, Command, CommandKind, decode_all
from services.trainer.rank0.resume import find_resume, may_load
from services.trainer.rank0.retention import Retention
from shared.bus.stores.ledger import JournalEntry, Ledger
from shared.process.service import Context
from shared.process.telemetry import tell

log = logging.getLogger(__name__)


class Opening:
    """Opens the run for the ranks, and opens it again."""

    def __init__(self, context: Context, branch: Branch, retention: Retention, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._branch = branch
        self._retention = retention
        self._loop = loop
        self._finding: concurrent.futures.Future[list[Command]] | None = None
        """Finds out from where to go on: seconds, or however long a checkpoint takes to be fetched."""
        self._orders: Iterator[Command] | None = None
        self.loaded: Checkpoint | None = None
        """The checkpoint that the ranks went on from; None: the initial policy."""
        self.stranded = False
        """Whether there is nothing to continue from: the checkpoint of a rollback cannot be loaded, or the run has ended."""

    def begin(self) -> None:
        """Begin to find out from where to continue, while the model is loaded."""
        self._finding = asyncio.run_coroutine_threadsafe(self._find(), self._loop)

    def next_order(self) -> Command | None:
        """Return the next order on the way to the ledger's step; None once every rank is there."""
        if self._finding is None and (self._orders is None or self._was_left()):
            self._finding = asyncio.run_coroutine_threadsafe(self._find(), self._loop)
        if self._finding is not None:
            if not concurrent.futures.wait([self._finding], TURN_S).done:
                return Command(CommandKind.STOP if self._context.stop.is_set() else CommandKind.WAIT)
            self._orders, self._finding = iter(self._finding.result()), None
        assert self._orders is not None
        return next(self._orders, None)

    def _was_left(self) -> bool:
        return asyncio.run_coroutine_threadsafe(self._branch.was_left(), self._loop).result()

    async def _find(self) -> list[Command]:
        """Take the epoch, and return the orders that bring every rank to the ledger's step."""
        context = self._context
        if self._orders is None:
            await self._warn()
        await self._branch.take_epoch()
        resume = await find_resume(
            context.bus, Ledger(context.bus), context.live, context.settings, self._retention.store
        )
        if resume.went_back:
            await self._branch.take_epoch()  # the rollback ended the one that was taken above
        await self._branch.follow(resume.status)
        replay = [await self._replayed(entries) for entries in resume.journal]
        self.loaded = resume.checkpoint
        self.stranded = resume.stranded or not (
            resume.checkpoint is None or await may_load(context.bus, resume.checkpoint)
        )
        if self.stranded:
            return []
        await asyncio.to_thread(self._retention.note_start, resume)
        load = (
            [Command(CommandKind.LOAD, folder=str(resume.checkpoint.folder))] if resume.checkpoint is not None else []
        )
        return [*load, *replay]

    async def _replayed(self, entries: Sequence[JournalEntry]) -> Command:
        payloads = tuple(entry.data for entry in entries)
        groups = decode_all(payloads)
        settings = await self._context.live.at(entries[0].settings_revision)
        lags = self._branch.lags(groups, entries[0].step - 1)
        return Command(CommandKind.REPLAY, "", payloads, groups, lags, settings.trainer.learning_rate, entries[0].plan)

    async def _warn(self) -> None:
        algorithm = self._context.settings.algorithm
        if algorithm.max_lag and algorithm.correction == "ignored" and algorithm.loss != "dpo":
            detail = f"samples may be {algorithm.max_lag} steps old and nothing corrects for it (algorithm.correction)"
            log.warning("uncorrected run", extra={"detail": detail})
            await tell(self._context.bus, "trainer", "uncorrected run", detail, max_lag=algorithm.max_lag)
