"""Commands that bring every rank to the ledger's step, at the start and after each rollback.

::

    take the epoch ──▶ find the state to continue from (``resume``) ──▶ LOAD the checkpoint ──▶ REPLAY journal steps
"""

import asyncio
import logging
from collections.abc import Sequence

from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.local_store import Checkpoint
from penstock.services.trainer.rank0.branch import Branch
from penstock.services.trainer.rank0.mailbox.commands import Command, CommandKind, decode_all
from penstock.services.trainer.rank0.mailbox.routes import fetch_all
from penstock.services.trainer.rank0.resume import find_resume, may_load
from penstock.services.trainer.rank0.retention import Retention
from penstock.shared.bus.stores.policy.ledger import JournalEntry, Ledger
from penstock.shared.bus.stores.replicas.place import Place
from penstock.shared.bus.stores.run.functions import (
    inherit_functions,
    note_functions,
    reward_functions,
    trainer_functions,
)
from penstock.shared.errors import SettingsError
from penstock.shared.files.source import digest
from penstock.shared.process.service import Context
from penstock.shared.process.telemetry import tell, tell_changed

log = logging.getLogger(__name__)


class Opening:
    """Opens and reopens the run for the ranks; on the event loop."""

    def __init__(self, context: Context, place: Place, branch: Branch, retention: Retention) -> None:
        self._context = context
        self._place = place
        self._branch = branch
        self._retention = retention
        self._begun = self._has_noted = False
        self.loaded: Checkpoint | None = None
        self.stranded = False
        """Whether a rollback's checkpoint cannot be loaded, or the run has ended."""
        self.restored = False
        """Whether the bus was empty when the run was opened last: it is new, or the bus has lost its data."""

    async def find(self) -> list[Command]:
        """Take the epoch and return the commands; may include fetching a checkpoint."""
        context = self._context
        if not self._begun:
            await self._warn()
        self._begun = True
        await self._branch.take_epoch()
        await self._place.take()
        resume = await find_resume(
            context.bus, Ledger(context.bus), context.live, context.settings, self._retention.store
        )
        if resume.went_back:
            await self._branch.take_epoch()  # the rollback ended the epoch taken above
        await self._branch.follow(resume.status)
        replay = [await self._replayed(entries) for entries in resume.journal]
        self.loaded, self.restored = resume.checkpoint, resume.restored
        self.stranded = resume.stranded or not (
            resume.checkpoint is None or await may_load(context.bus, resume.checkpoint)
        )
        if self.stranded:
            return []
        await self._retention.note_start(resume)
        first = resume.checkpoint or await self._start()
        await self._note_functions(first)
        load = [] if first is None else [Command(CommandKind.LOAD, folder=str(first.folder))]
        return [*load, *replay]

    async def _start(self) -> Checkpoint | None:
        """Return the checkpoint of another run with which this one begins (``penstock up --from``), if any."""
        folder = self._context.settings.run_folder / local_store.START
        if not folder.exists():
            return None
        if reason := await asyncio.to_thread(local_store.damage, folder):
            raise SettingsError(f"the checkpoint {folder} is damaged ({reason}): put an intact copy in its place")
        return local_store.read(folder)

    async def _note_functions(self, first: Checkpoint | None) -> None:
        """Report functions whose source files are others than those of earlier versions; they are not refused."""
        bus, settings = self._context.bus, self._context.settings
        own = trainer_functions(settings)
        changed = []
        if first is not None:
            used = {**own, **reward_functions(settings)}.keys() & first.state.functions.keys()
            noted = {function: first.state.functions[function] for function in sorted(used)}
            changed = await inherit_functions(bus, noted, first.state.version)
        if not self._has_noted:
            changed += await note_functions(bus, {function: digest(name) for function, name in own.items()})
        self._has_noted = True
        await tell_changed(bus, "trainer", changed)

    async def _replayed(self, entries: Sequence[JournalEntry]) -> Command:
        payloads = tuple(entry.data for entry in entries)
        groups = decode_all(payloads)
        settings = await self._context.live.at(entries[0].settings_revision)
        plan = entries[0].plan
        lags, rate = self._branch.lags(groups, entries[0].step - 1), settings.trainer.learning_rate
        known = await fetch_all(self._context.bus, groups, settings.trainer)
        routes = {claim: payload for part in known for claim, payload in part.items()}
        return Command(CommandKind.REPLAY, "", payloads, groups, lags, rate, plan, routes=routes)

    async def _warn(self) -> None:
        algorithm = self._context.settings.algorithm
        if algorithm.max_lag and algorithm.correction == "ignored" and algorithm.loss != "dpo":
            detail = f"samples may be {algorithm.max_lag} steps old and nothing corrects for it (algorithm.correction)"
            log.warning("uncorrected run", extra={"detail": detail})
            await tell(self._context.bus, "trainer", "uncorrected run", detail, max_lag=algorithm.max_lag)
