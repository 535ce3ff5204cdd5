"""Rank 0's driver: it commands all ranks through the mailbox and does the work on the bus.

::

    opening ──▶ ranks are at the ledger's step ──▶ intake ──▶ TRAIN ──▶ branch (commit) ──▶ CHECKPOINT ──▶ retention
       ▲                                                              └ refused: a rollback
       └──────────────────────────────────────────────────────────────┘

Weights are published first, then one transaction journals the batch and commits the version. After a crash before it,
the batch is pending on the bus; after it, replayed. After a rollback the commit is refused.

It looks for the checkpoint while the training thread still imports torch, so that damage is reported early; torch and
what needs it are imported only where they are used.
"""

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from penstock.services.trainer import metrics as measures
from penstock.services.trainer.batch.staleness import without_long
from penstock.services.trainer.checkpoint.commits import note_committed
from penstock.services.trainer.export.exporter import Exporter
from penstock.services.trainer.metrics import (
    BatchFigures,
    batch_figures,
    export_metrics,
    mixed_figures,
    signal_fraction,
)
from penstock.services.trainer.rank0.branch import Branch, TakenOver
from penstock.services.trainer.rank0.checkpoints import CLOSE_S, Checkpoints
from penstock.services.trainer.rank0.first_texts import first_texts
from penstock.services.trainer.rank0.intake import Intake, Taken
from penstock.services.trainer.rank0.mailbox import results
from penstock.services.trainer.rank0.mailbox.commands import TURN_S, Command, CommandKind
from penstock.services.trainer.rank0.mailbox.queues import Mailbox
from penstock.services.trainer.rank0.mailbox.results import Notice, R, Result, StepMade, StepSkipped
from penstock.services.trainer.rank0.opening import Opening
from penstock.services.trainer.rank0.retention import Retention
from penstock.services.trainer.rank0.rounding import rounding
from penstock.shared.bus.messages import PolicyRecord, StepReport
from penstock.shared.bus.stores.experience.signals import SignalChange
from penstock.shared.bus.stores.policy import held_out
from penstock.shared.bus.stores.policy.ledger import ENDED, POLICY, Ledger, RunState
from penstock.shared.bus.stores.replicas.place import Place
from penstock.shared.bus.streams import JOURNAL
from penstock.shared.errors import Fenced, WeightsError
from penstock.shared.placement.turns import TrainerTurns
from penstock.shared.process.service import Context, seconds_left
from penstock.shared.process.telemetry import tell
from penstock.shared.settings import RunKind, Settings
from penstock.shared.traces import TRACES

log = logging.getLogger(__name__)

T = TypeVar("T")
_EXPORT_AGAIN_S = 5.0
_SHOWN: tuple[str, ...] = ("reward_mean", "kl_mean", "entropy")
_LOGGED = ("reward_mean", "loss", "kl_mean", "entropy", "lag_mean", "samples_per_s")


class Driver:
    """Drives one trainer's ranks; on the event loop, except for the mailbox."""

    def __init__(self, context: Context, mailbox: Mailbox, turns: TrainerTurns, place: Place) -> None:
        self._context, self._settings = context, context.settings
        self._turns, self._place = turns, place
        self._mailbox = mailbox
        self._bus = context.bus
        self._ledger = Ledger(context.bus)
        self._live = context.live
        self._branch = Branch(context.bus)
        self._intake = Intake(context.bus, context.live, self._branch.steps)
        self._exporter = Exporter(context.bus, context.settings)
        self._retention = Retention(context.settings, context.bus, lambda: self._exporter.reading)
        self._checkpoints = Checkpoints(context, mailbox, self._branch, self._retention, self._ask)
        self._opening = Opening(context, place, self._branch, self._retention)
        self._step = 0
        self._is_open = self._is_ready = False
        """Whether the ranks have the ledger's step, and have published it."""
        self._differs = self._has_warned = False
        """Whether a replay differed, and whether rounded gradients were reported."""
        self._filling: asyncio.Task[None] | None = None
        self.finished = False
        """Whether the run had finished or was stopped for good, when that was looked up last."""
        self._skipped = 0  # consecutive batches
        self._committed_s, self._commit_s = time.perf_counter(), 0.0
        self._export_again_s, self._refused = math.inf, ""
        measures.GRAD_NORM_LIMIT.set(self._settings.trainer.max_grad_norm)

    async def run(self) -> None:
        """Drive the ranks until shutdown and store unsaved work; raise the error that ended training."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self._drive()
        except BaseException as error:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self._mailbox.close(error)
            raise error from None

    async def _drive(self) -> None:
        storing, exporting = self._task(self._retention.run()), self._task(self._exporter.run())
        noting, keeping = self._task(self._checkpoints.run()), self._task(self._place.keep())
        finding = self._task(self._opening.find())  # while the model loads, to report damage early
        model = await self._result(results.ModelLoaded)
        self._intake.vocabulary, self._intake.context_tokens = model.vocabulary, model.context_tokens
        try:
            while not self._context.stop.is_set():
                if self._is_open:
                    await self._turn()
                    finding = finding if self._is_open else self._task(self._opening.find())
                elif finding.done():
                    if await self._take_device():
                        await self._open(finding.result())
                else:
                    await self._or_stop(asyncio.wait([finding], timeout=TURN_S))
                    await self._ask(Command(CommandKind.WAIT), Result)
        except TakenOver as error:
            self._checkpoints.is_new = False  # the step is the other's to make
            await self._place.give_up()
            await tell(self._bus, self._context.replica, "place taken", str(error))
            if not self._context.stop.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
        self._context.status.state = "stopping"
        await self._checkpoint_at_stop()
        self.finished = await self._ledger.state() in ENDED
        self._mailbox.command(Command(CommandKind.FINISH if self.finished else CommandKind.STOP))
        for task in filter(None, (finding, exporting, noting, self._filling)):
            task.cancel()
        await self._retention.close(max(0.0, seconds_left() - CLOSE_S))
        for task in (storing, keeping):  # the next trainer starts once all is stored
            task.cancel()

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self._tasks.create_task(work)

    async def _open(self, commands: Sequence[Command]) -> None:
        loaded = self._opening.loaded
        self._step, self._differs = 0 if loaded is None else loaded.state.step, False
        if self._opening.restored and self._filling is not None:
            if not any(command.kind is CommandKind.LOAD for command in commands):
                raise Fenced("the bus lost its data before the first checkpoint: the trainer starts again")
            await self._forget_experience(self._filling)
        for command in commands:
            self._context.status.state = "replaying"  # ready, as no startup probe allows for the longest replay
            loads = command.kind is CommandKind.LOAD
            self._context.status.start.begin("loading the checkpoint" if loads else "replaying the journal")
            result = await self._ask(command, Result)
            if isinstance(result, results.Replayed):
                self._step, self._checkpoints.is_new = self._step + 1, True
                if result.difference:
                    self._differs = True
                    log.warning("replay differs", extra={"detail": result.difference})
                    await tell(self._bus, "trainer", "replay differs", result.difference, step=self._step)
        self._is_open = True

    async def _forget_experience(self, filling: asyncio.Task[None]) -> None:
        """Have what the bus lost not trained again: its entries could not be committed."""
        filling.cancel()
        await asyncio.wait([filling])
        self._intake.forget()
        self._filling = None

    async def _leave(self) -> None:
        await self._checkpoints.written()  # the opening deletes what is incomplete
        self._is_open = self._is_ready = self._checkpoints.is_new = False
        self._export_again_s = math.inf

    async def _turn(self) -> None:
        can_train = not (self._opening.stranded or self.finished) and self._step < self._settings.run.steps
        if can_train and self._filling is None:
            self._filling = self._task(self._intake.fill())  # not before the epoch is taken
        if can_train and (suspect := await self._or_stop(self._intake.next_suspect())) is not None:
            if await self._take_device():
                await self._try(suspect)
        elif not self._is_ready and not self._opening.stranded:
            if await self._take_device():
                await self._get_ready()
        else:
            await self._next_step(can_train)

    async def _take_device(self) -> bool:
        """Wait for shared devices; return False if the trainer stops first."""
        while not await self._turns.acquire(CLOSE_S if self._context.stop.is_set() else TURN_S):
            if self._context.stop.is_set():
                return False
            await self._ask(Command(CommandKind.IDLE), Result)
        return True

    async def _release_device(self, *, can_train: bool) -> None:
        """Release shared devices unless the next batch is complete."""
        turns = self._turns
        if not turns.may_end or (can_train and await self._intake.next_batch(self._step, 0.0) is not None):
            return
        command = Command(CommandKind.FREE, rung=turns.rung, offload_bytes=turns.offload_bytes)
        freed = await self._ask(command, results.Freed)
        await turns.end(freed.memory, freed.moved_bytes)

    async def _next_step(self, can_train: bool) -> None:
        await self._release_device(can_train=can_train)
        waiting = self._intake.next_batch(self._step, TURN_S) if can_train else asyncio.sleep(TURN_S)
        batch: list[Taken] | None = await self._or_stop(waiting)
        left, _ = await asyncio.gather(self._branch.was_left(), self._live.refresh())
        if left:
            await self._leave()
        elif batch is not None:
            await self._train(batch)
        else:
            self._context.status.state = "waiting"
            if can_train and await self._is_journal_in_the_way():
                await self._retention.make_room()
                await self._checkpoint_new()
            await self._ask(Command(CommandKind.WAIT if self._opening.stranded else CommandKind.IDLE), Result)
            over = self._step >= self._settings.run.steps and not self._opening.stranded
            if over and time.monotonic() > self._export_again_s and await self._take_device():
                await self._export()
            await self._end_with_the_run()

    async def _end_with_the_run(self) -> None:
        """Once the run is over, store what is not yet stored; then leave, if asked to."""
        status = await self._ledger.status()
        await self._is_over(status.state)
        if not self._opening.stranded:
            self._branch.check(status, self._step)
        if status.is_over(self._settings.run.steps):
            await self._checkpoint_new()
            await self._checkpoints.written()
            stored = self._retention.is_stored
            self._context.status.values["stored"] = float(stored)
            if stored and self._settings.internal.leave_when_over:
                os.kill(os.getpid(), signal.SIGTERM)

    async def _or_stop(self, work: Coroutine[Any, Any, T]) -> T | None:
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._context.stop.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            stopping.cancel()

    async def _ask(self, command: Command, kind: type[R]) -> R:
        self._mailbox.command(command)
        result = await self._result(kind)
        await self._turns.confirm()
        return result

    async def _result(self, kind: type[R]) -> R:
        while isinstance(result := await self._mailbox.result(), Notice):
            await self._note(result)
        assert isinstance(result, kind)
        return result

    async def _note(self, notice: Notice) -> None:
        if isinstance(notice, results.Began):
            self._context.status.start.begin(notice.activity)
        elif isinstance(notice, results.SelfTested):
            await self._ledger.note_self_test(notice.part, notice.outcome)
            detail = f"{notice.part}: {notice.outcome}"
            await tell(self._bus, "trainer", "self-test passed", detail, **notice.figures)
            if notice.reason:
                detail = f"{notice.part}: {notice.reason}"
                await tell(self._bus, "trainer", "sequences are not packed", detail)
        elif not self._context.stop.is_set():
            os.kill(os.getpid(), signal.SIGTERM)  # like a signal to this host

    async def _try(self, suspect: Taken) -> None:
        """Run a suspect group alone; the bus has counted the attempt."""
        group, most_tokens = suspect.experience.group, self._settings.trainer.row_tokens
        contexts = without_long(group, (0,) * len(group.samples), most_tokens)
        command = Command(
            CommandKind.TRY,
            payloads=(suspect.delivery.data,),
            groups=(suspect.experience,),
            contexts=contexts if any(contexts) else (),
            rung=self._turns.rung,
        )
        try:
            await self._ask(command, Result)
        except Exception as error:
            await self._intake.note_tried(f"{type(error).__name__}: {error}")
            raise
        await self._intake.note_tried()

    async def _is_journal_in_the_way(self) -> bool:
        return bool((await self._ledger.status()).bus_full) and await self._bus.length(JOURNAL) > 0

    async def _train(self, batch: list[Taken]) -> None:
        if not await self._take_device():
            return
        groups = tuple(taken.experience for taken in batch)
        contexts = tuple(tokens for taken in batch for tokens in taken.contexts)
        # Both at once, and after the wait: the journal names the revision that the step was made with.
        learning_rate, self._branch.revision = self._live.settings.trainer.learning_rate, self._live.revision
        await self._intake.note_batch(batch)
        state = await self._ledger.state()  # after the note, as the coordinator reads that after the state
        if await self._is_over(state):
            return
        self._context.status.state = "working"
        self._mailbox.command(
            Command(
                CommandKind.TRAIN,
                payloads=tuple(taken.delivery.data for taken in batch),
                groups=groups,
                lags=self._branch.lags(groups, self._step),
                contexts=contexts if any(contexts) else (),
                learning_rate=learning_rate,
                version=self._branch.next_version(),
                rung=self._turns.rung,
                held_out=await self._held_out(),
                routes={claim: payload for taken in batch for claim, payload in taken.routes.items()},
            )
        )
        figures_of = mixed_figures if self._settings.kind is RunKind.MIXTURE else batch_figures
        most = self._settings.trainer.row_tokens
        figures = figures_of(groups, self._step, self._branch.steps, contexts, most_tokens=most)
        result = await self._result(Result)
        await self._turns.confirm()
        if isinstance(result, StepSkipped):
            await self._skip(batch, result)
            return
        assert isinstance(result, StepMade)
        self._skipped = 0
        if not await self._commit(batch, result, figures):
            log.info("step skipped: the run was rolled back", extra={"step": self._step + 1})
            await self._intake.note_batch([])
            await self._leave()
            return
        trainer, steps = self._settings.trainer, self._settings.run.steps
        if self._step % trainer.checkpoint_every_steps == 0 or self._step == steps:
            await self._checkpoint_new()
        if self._step == steps:
            await self._checkpoints.written()
            await self._export()

    async def _is_over(self, state: RunState) -> bool:
        """Whether the run is over; what is held is left to the coordinator then, which drops it."""
        self.finished = state in ENDED
        if self.finished and self._filling is not None:
            self._context.status.state = "waiting"
            await self._intake.note_batch([])
            await self._forget_experience(self._filling)
        return self.finished

    async def _held_out(self) -> tuple[bytes, ...]:
        """Return the demonstrations to evaluate with the next step: with the first, the last and every ``every_steps``."""
        step, sets = self._step + 1, self._settings.evaluation.held_out
        if self._settings.kind.generates or not sets:
            return ()
        due = step in (1, self._settings.run.steps) or step % sets[0].every_steps == 0
        return await held_out.offered(self._bus) if due else ()

    async def _commit(self, batch: list[Taken], made: StepMade, figures: BatchFigures) -> bool:
        started_s = time.perf_counter()
        metrics = {**made.measured, **figures.metrics, **made.memory, **await self._left()}
        metrics |= signal_fraction(metrics, len(batch))
        await self._warn_of_rounding(metrics.get("micro_batches", 0.0))
        metrics |= self._timing(made, figures, started_s - self._committed_s) | self._turns.take_figures()
        shown = {name: metrics[name] for name in _SHOWN if name in metrics}
        groups = [taken.experience.group_id for taken in batch]
        record = self._branch.record(self._step + 1, made.published, shown, tuple(filter(TRACES.takes, groups)))
        lags = {str(lag): count for lag, count in sorted(figures.lag_counts.items())}
        report = StepReport(record.step, record.version, time.time(), figures.samples, metrics, lags)
        self._committed_s = started_s
        deliveries = [taken.delivery for taken in batch]
        change = self._intake.take_signals(batch)
        if not await self._branch.commit(record, deliveries, report, made.plan, change):
            return False
        self._step, self._checkpoints.is_new, self._commit_s = record.step, True, time.perf_counter() - started_s
        self._intake.release(batch)
        for group in record.traced:
            TRACES.add("trained", group, record.created_at_s - metrics["step_s"], time.time(), step=record.step)
        await self._note_published(record, len(batch))
        export_metrics(record.step, record.version, figures, metrics)
        self._context.status.values.update(step=float(record.step), tokens_per_s=metrics["tokens_per_s"])
        self._context.status.note_memory({"peak": made.memory.get("memory_bytes", 0.0) + self._turns.absent_bytes})
        for rank, samples in enumerate(made.samples):
            for sample in samples:
                self._context.status.memory.note(sample, rank)
        logged = {name: round(metrics[name], 4) for name in _LOGGED if name in metrics}
        log.info("step", extra={"step": record.step, "version": record.version, **logged})
        return True

    def _timing(self, made: StepMade, figures: BatchFigures, step_s: float) -> dict[str, float]:
        """Return seconds and rates, without the wait for the previous commit."""
        phases = {**made.seconds, "commit": self._commit_s}
        phases["wait"] = max(0.0, phases.get("wait", 0.0) - self._commit_s)
        rates = {"tokens_per_s": figures.tokens / step_s, "samples_per_s": figures.samples / step_s}
        return {"step_s": step_s, **rates, **{f"phase_{phase}_s": seconds for phase, seconds in phases.items()}}

    async def _left(self) -> dict[str, float]:
        left = await self._intake.take_left()
        dropped = ("stale", "fenced", "too_long", "no_signal", "filtered", "nonfinite")
        return {"requeued": float(left["requeued"]), **{f"dropped_{reason}": float(left[reason]) for reason in dropped}}

    async def _skip(self, batch: list[Taken], skipped: StepSkipped) -> None:
        await self._intake.discard(batch, "nonfinite", skipped.reason)
        await tell(self._bus, "trainer", "batch skipped", skipped.reason, groups=len(batch))
        if skipped.touched:
            raise RuntimeError(
                f"{skipped.reason}, after some of its weights had moved: nothing was committed, the batch is dropped, and the "
                "trainer starts again from its checkpoint and journal"
            )
        self._skipped += 1
        if self._skipped > (most := self._settings.trainer.max_skipped_steps):
            self._skipped = 0
            await self._pause(
                f"guard nonfinite: expected at most {most} batches in a row that "
                f"are not finite, found one more; the last: {skipped.reason}: lower "
                "trainer.learning_rate, or roll back, then resume"
            )

    async def _pause(self, reason: str) -> None:
        paused, _ = await self._ledger.transition(RunState.PAUSED, reason, [RunState.RUNNING])
        if paused:
            log.error("run paused", extra={"reason": reason})
            await tell(self._bus, "trainer", "guard nonfinite", reason, guard="nonfinite", action="pause")

    async def _get_ready(self) -> None:
        if self._differs or not await self._is_published():
            self._context.status.start.begin("publishing the first version")
            texts = await first_texts(self._bus, self._settings, self._intake.vocabulary or 0)
            command = Command(CommandKind.PUBLISH, version=self._branch.next_version(), texts=texts)
            published = await self._ask(command, results.Published)
            record, loaded = self._branch.record(self._step, published, {}), self._opening.loaded
            if loaded is not None and loaded.state.step != self._step:
                loaded = None
            change = SignalChange(whole=loaded.state.signals) if loaded and self._settings.data.curriculum else None
            if await self._branch.commit(record, [], None, None, change):
                await self._note_published(record)
                if loaded is not None:
                    await self._retention.note_version(record.version, loaded)
        self._is_ready, self._differs = True, False
        self._context.status.state = "waiting"
        self._context.status.start.end()
        self._committed_s = time.perf_counter()
        if self._step >= self._settings.run.steps:
            await self._export()

    async def _is_published(self) -> bool:
        record = await self._branch.newest_of(self._step)
        if record is None or not outlives_the_process(self._settings):
            return False
        from penstock.shared.weights.format.snapshot import read_snapshot

        try:
            await asyncio.to_thread(read_snapshot, Path(record.location), record.manifest_digest)
        except WeightsError as error:
            log.warning("newest snapshot was removed, publishing again", extra={"error": str(error)})
            return False
        self._context.status.version = record.version
        return True

    async def _note_published(self, record: PolicyRecord, groups: int = 0) -> None:
        from penstock.shared.weights.format.snapshot import keep_newest

        self._context.status.version = record.version
        await asyncio.to_thread(note_committed, self._settings.run_folder, record.version, record.step, groups)
        await asyncio.to_thread(keep_newest, self._settings.snapshot_folder, self._settings.weights.keep)

    async def _checkpoint_new(self) -> None:
        if not self._checkpoints.is_new:
            return
        await self._checkpoints.written()
        if await self._take_device():
            await self._checkpoints.begin(self._step)

    async def _warn_of_rounding(self, micro_batches: float) -> None:
        if not self._has_warned and (detail := rounding(micro_batches, self._settings)):
            self._has_warned = True
            log.warning("gradients are rounded", extra={"detail": detail})
            await tell(self._bus, "trainer", "gradients are rounded", detail, micro_batches=int(micro_batches))

    async def _checkpoint_at_stop(self) -> None:
        await self._checkpoints.written()
        ended = await self._ledger.state() in ENDED  # no resume replays its journal
        if ended or await self._checkpoints.fits_into_stop(self._step):
            await self._checkpoint_new()
            await self._checkpoints.written()

    async def _export(self) -> None:
        written = await self._ask(Command(CommandKind.EXPORT), results.PolicyWritten)
        await self._ledger.note_missing(POLICY, written.refusal)
        self._export_again_s = time.monotonic() + _EXPORT_AGAIN_S if written.may_succeed else math.inf
        if written.refusal:
            if written.refusal != self._refused:
                await tell(self._bus, "trainer", "policy not written", written.refusal, step=self._step)
            self._refused = written.refusal
            self._context.status.state = "waiting"
            return
        await self._ledger.note_policy(self._step)
        for folder in written.folders:
            self._retention.note_policy(folder)
        self._context.status.state = "waiting"
        log.info("final policy written", extra={"folder": str(written.folders[-1])})


def outlives_the_process(settings: Settings) -> bool:
    """Whether published weights outlive this process."""
    return settings.weights.transport == "file" or settings.publishes_adapters
