"""Checkpoints written beside training, one at a time.

::

    begin: the ranks copy the newest step ──▶ training continues ──▶ run: all files of all ranks are durable ──▶ retention
                                                                 └─▶ written: waits for that

Until then the checkpoint before and the journal are what a resume uses.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from penstock.services.trainer.checkpoint.manifests import CheckpointState
from penstock.services.trainer.rank0.branch import Branch
from penstock.services.trainer.rank0.mailbox.commands import TURN_S, Command, CommandKind
from penstock.services.trainer.rank0.mailbox.queues import Mailbox
from penstock.services.trainer.rank0.mailbox.results import Result
from penstock.services.trainer.rank0.retention import Retention
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.process.service import Context, seconds_left
from penstock.shared.process.telemetry import tell

log = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Of a stop, for what follows the last checkpoint."""


class Checkpoints:
    """On the event loop; ``ask`` sends a command to the ranks, which idle while they wait."""

    def __init__(
        self,
        context: Context,
        mailbox: Mailbox,
        branch: Branch,
        retention: Retention,
        ask: Callable[[Command, type[Result]], Awaitable[Result]],
    ) -> None:
        self._context, self._mailbox, self._branch, self._retention = context, mailbox, branch, retention
        self._ask = ask
        self._ledger = Ledger(context.bus)
        self._begun: tuple[CheckpointState, float] | None = None
        """The one that is being written, and when it was begun."""
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.is_new = False
        """Whether the step is in no checkpoint that is written or being written."""
        self.last_s = 0.0
        """From the beginning of the last one until it was written."""

    async def run(self) -> None:
        """Note checkpoints once they are written, forever."""
        while True:
            saved = await self._mailbox.saved()
            assert self._begun is not None
            state, began_s = self._begun
            self.last_s = time.monotonic() - began_s
            if saved.checkpoint is None:
                self.is_new = True
            if saved.checkpoint is None or await self._branch.has(state.version):  # else the next opening decides
                await self._retention.note(state.step, saved)
            self._begun = None
            self._is_idle.set()

    async def begin(self, step: int) -> None:
        """Have the ranks copy ``step`` and write it; after :meth:`written`."""
        assert self._branch.newest is not None
        state = await self._retention.describe(step, self._branch.newest, self._context.live)
        if not self._branch.is_ours(await self._ledger.status(), step):
            return  # `state` is of another branch, or of a bus that has lost data
        self._is_idle.clear()
        self._begun = state, time.monotonic()
        self.is_new = False
        await self._ask(Command(CommandKind.CHECKPOINT, state=state), Result)

    async def written(self) -> None:
        """Wait until the one that is being written, if any, counts or has failed."""
        began_s = time.monotonic()
        while not self._is_idle.is_set():
            waiting = asyncio.ensure_future(self._is_idle.wait())
            await asyncio.wait([waiting], timeout=TURN_S)
            waiting.cancel()
            if not self._is_idle.is_set():
                await self._ask(Command(CommandKind.IDLE), Result)
        if (waited_s := time.monotonic() - began_s) > TURN_S:
            log.info("waited for a checkpoint to be written", extra={"seconds": round(waited_s, 1)})

    async def fits_into_stop(self, step: int) -> bool:
        """Whether ``step`` is stored, or the process has time to store it; else a resume replays the journal."""
        left_s = seconds_left()
        if not (self.is_new and left_s and self.last_s > left_s - CLOSE_S):
            return True
        detail = (
            f"step {step} is in no checkpoint and will be replayed: writing the last one took {self.last_s:.0f} s, and "
            f"{max(0.0, left_s - CLOSE_S):.0f} s were left; raise bus.drain_s (the chart's bus.drainSeconds)"
        )
        log.warning("stopped without a checkpoint", extra={"detail": detail})
        await tell(self._context.bus, "trainer", "stopped without a checkpoint", detail, step=step)
        return False
