"""Rank 0's side of the training loop: what to do next, publish, commit, tell. It runs on the training thread and reaches
the bus through the event loop of the main thread, where exports go on beside it (``exporter``).

::

    opening ──▶ ranks stand where the ledger does ──▶ intake ──▶ TRAIN ──▶ publication ──▶ branch (commit) ──▶ retention (checkpoints)
       ▲                                                                                     └ False: a rollback
       └─────────────────────────────────────────────────────────────────────────────────────┘

Order of a commit (see docs/architecture.md): the weights are put where replicas can get them, then one transaction moves
the batch to the journal and publishes the version. A trainer that dies before it leaves its batch pending on the bus; one that dies after
it is replayed from the journal. A rollback ends the epoch under which this trainer commits: what it was about to commit is
refused, and the ranks load the checkpoint that the ledger went back to, as after a start (``opening``).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from services.trainer import metrics as measures
from services.trainer.checkpoint.local_store import Checkpoint
from services.trainer.checkpoint.manifests import CheckpointState
from services.trainer.export.exporter import Exporter
from services.trainer.metrics import Phases, batch_figures, export_metrics
from services.trainer.model.adapter import file_configuration
from services.trainer.model.engine import TrainingEngine
from services.trainer.model.policy import export, export_adapter
from services.trainer.rank0.branch import Branch
from services.trainer.rank0.commands import TURN_S, Command, CommandKind
from services.trainer.rank0.intake import Intake, Taken
from services.trainer.rank0.opening import Opening
from services.trainer.rank0.publication import Publication, note_version
from services.trainer.rank0.retention import Retention
from shared.bus.messages import PolicyRecord, PolicyVersion, Probe, StepPlan, StepReport
from shared.bus.stores.ledger import ENDED, Ledger, RunState
from shared.bus.streams import JOURNAL
from shared.errors import WeightsError
from shared.process.service import Context, seconds_left
from shared.process.telemetry import tell
from shared.weights.format.snapshot import read_snapshot

log = logging.getLogger(__name__)

T = TypeVar("T")
_CLOSE_S = 10.0
"""What is left for the rest of an orderly end when storing ends."""


class Lead:
    """Leads the ranks of one trainer."""

    def __init__(self, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._settings = context.settings
        self._bus = context.bus
        self._ledger = Ledger(context.bus)
        self._live = context.live
        self._loop = loop
        self._branch = Branch(context.bus)
        self._intake = Intake(context.bus, context.live, self._branch.steps)
        self._filling: asyncio.Task[None] | None = None
        self._exporter = Exporter(context.bus, context.settings)
        self._exporting = loop.create_task(self._exporter.run())
        self._publication = Publication(context.settings, context.host, context.secret)
        self._batch: list[Taken] = []
        self._retention = Retention(context.settings, context.bus, self._call, lambda: self._exporter.reading)
        self._opening = Opening(context, self._branch, self._retention, loop)
        self._committed_s = time.perf_counter()
        measures.GRAD_NORM_LIMIT.set(self._settings.trainer.max_grad_norm)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def begin(self) -> None:
        """Begin what takes no model: find out from where the run continues, so that damage is reported at once."""
        self._opening.begin()

    # ---------------------------------------------------------------- orders

    def next_order(self, step: int, phases: Phases) -> Command:
        """Return what every rank does next: first the resume, then batches, STOP once SIGTERM came."""
        if self._exporting.done():
            self._exporting.result()  # raises what stopped it
        self._retention.check()
        if (order := self._opening.next_order()) is not None:
            self._batch = []  # after a rollback: its groups stay in the intake's hands, which looks at them again
            return order
        if self._context.stop.is_set():
            self._context.status.state = "stopping"
            return Command(CommandKind.STOP)
        if self._opening.stranded:
            self._call(self._wait_for_stop())
            return Command(CommandKind.WAIT)
        if step >= self._settings.run.steps:
            self._call(self._wait_for_stop())
            return Command(CommandKind.IDLE)
        if (suspect := self._call(self._next_suspect())) is not None:
            return Command(CommandKind.TRY, payloads=(suspect.delivery.data,), groups=(suspect.experience,))
        with phases.measure("wait"):
            batch = self._call(self._next_batch(step))
            settings = self._call(self._live.refresh())  # what holds now holds for this step, and the journal says so
        if batch is None:
            self._context.status.state = "waiting"
            if not self._call(self._is_journal_in_the_way()):
                return Command(CommandKind.IDLE)
            self._retention.make_room()
            return Command(CommandKind.CHECKPOINT)
        self._context.status.state = "working"
        self._batch, self._branch.revision = batch, self._live.revision
        self._call(self._intake.note_batch(batch))
        return Command(
            CommandKind.TRAIN,
            payloads=tuple(taken.delivery.data for taken in batch),
            groups=tuple(taken.experience for taken in batch),
            lags=self._branch.lags([taken.experience for taken in batch], step),
            learning_rate=settings.trainer.learning_rate,
        )

    def limit(self, vocabulary: int, context_tokens: int) -> None:
        """Take groups only of token ids below ``vocabulary`` and of sequences within ``context_tokens`` (0: of any length)."""
        self._intake.vocabulary, self._intake.context_tokens = vocabulary, context_tokens

    def note_tried(self, cause: str = "") -> None:
        """Note that the group of a TRY order was run, or that the trainer ends by ``cause``."""
        self._call(self._intake.note_tried(cause))

    async def _is_journal_in_the_way(self) -> bool:
        """Whether the bus is full and a checkpoint would let the journal go: no step comes that would lead to one."""
        return bool((await self._ledger.status()).bus_full) and await self._bus.length(JOURNAL) > 0

    async def _wait_for_stop(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TURN_S):
                await self._context.stop.wait()

    async def _next_suspect(self) -> Taken | None:
        self._fill()
        assert self._filling is not None
        looking = asyncio.create_task(self._intake.next_suspect())
        await asyncio.wait([looking, self._filling], return_when=asyncio.FIRST_COMPLETED)
        self._fill()
        return await looking

    def _fill(self) -> None:
        """Let the intake take what arrives; raise what stopped it."""
        if self._filling is None:
            self._filling = asyncio.create_task(self._intake.fill())
        if self._filling.done():
            self._filling.result()

    async def _next_batch(self, step: int) -> list[Taken] | None:
        self._fill()
        waiting = asyncio.create_task(self._intake.next_batch(step, TURN_S))
        stopping = asyncio.create_task(self._context.stop.wait())
        await asyncio.wait([waiting, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not waiting.done():
            waiting.cancel()
            return None
        return waiting.result()

    # ---------------------------------------------------------------- publish and commit

    def is_published(self, step: int) -> bool:
        """Whether the weights of ``step`` are the ledger's newest version already, readable."""
        return self._call(self._is_published(step))

    def publish(self, engine: TrainingEngine, step: int, probe: Probe | None) -> None:
        """Publish the weights of ``step``, which is committed already, as a new version."""
        record = self._record(engine, step, {}, probe)
        if not self._call(self._branch.commit(record, [], None)):
            return
        self._published(record)
        loaded = self._opening.loaded
        if loaded is not None and loaded.state.step == step:
            self._retention.note_version(record.version, loaded)

    def ready(self) -> None:
        """Say that training can begin."""
        self._context.status.state = "waiting"
        self._committed_s = time.perf_counter()

    async def _is_published(self, step: int) -> bool:
        record = await self._branch.newest_of(step)
        if record is None or not self._publication.outlives_the_process:
            return False
        try:
            await asyncio.to_thread(read_snapshot, Path(record.location), record.manifest_digest)
        except WeightsError as error:
            log.warning("newest snapshot is gone, publishing again", extra={"error": str(error)})
            return False
        self._context.status.version = record.version
        return True

    def _record(
        self, engine: TrainingEngine, step: int, metrics: dict[str, float], probe: Probe | None
    ) -> PolicyRecord:
        version = self._branch.next_version()
        note_version(self._settings.run_folder, version)
        found = self._publication.publish(engine, version, step)
        return PolicyRecord(
            version=version,
            parent=self._branch.tip,
            step=step,
            created_at_s=time.time(),
            manifest_digest=found.digest,
            location=found.location,
            metrics=metrics,
            source=found.source,
            probe=probe,
            settings_revision=self._branch.revision,
        )

    def _published(self, record: PolicyRecord) -> None:
        self._context.status.version = record.version
        self._publication.clear()

    def commit(
        self,
        engine: TrainingEngine,
        step: int,
        measured: dict[str, float],
        plan: StepPlan,
        probe: Probe | None,
        phases: Phases,
    ) -> bool:
        """Publish the weights of ``step`` and move its batch to the journal, in one transaction; False when the run was
        rolled back meanwhile: nothing of it is committed."""
        batch, self._batch = self._batch, []
        figures = batch_figures([taken.experience for taken in batch], step - 1, self._branch.steps)
        metrics = {**measured, **figures.metrics}
        with phases.measure("snapshot"):
            shown = {name: metrics[name] for name in ("reward_mean", "kl_mean", "entropy")}
            record = self._record(engine, step, shown, probe)
        step_s = time.perf_counter() - self._committed_s
        metrics |= self._rates(figures, step_s) | self._left() | phases.take_memory()
        metrics |= {f"phase_{phase}_s": seconds for phase, seconds in phases.take().items()}
        report = StepReport(
            step=step,
            version=record.version,
            finished_at_s=time.time(),
            samples=figures.samples,
            metrics=metrics,
            lag_counts={str(lag): count for lag, count in sorted(figures.lag_counts.items())},
        )
        self._committed_s = time.perf_counter()
        with phases.measure("commit"):
            if not self._call(self._branch.commit(record, [taken.delivery for taken in batch], report, plan)):
                return False
        self._call(self._intake.release(batch))
        self._published(record)
        self._tell_step(step, record.version, figures, metrics)
        return True

    def skip(self, reason: str, detail: str) -> None:
        """Let the batch of the last order leave the bus untrained."""
        batch, self._batch = self._batch, []
        self._call(self._intake.discard(batch, reason, detail))
        self._call(tell(self._bus, "trainer", "batch skipped", detail, groups=len(batch)))

    def notify(self, name: str, detail: str, **fields: float) -> None:
        """Write an event for people."""
        self._call(tell(self._bus, "trainer", name, detail, **fields))

    def note_self_test(self, part: str, outcome: str) -> None:
        """Have the run's status say how the self-test of ``part`` went."""
        self._call(self._ledger.note_self_test(part, outcome))

    def pause(self, reason: str) -> None:
        """Pause the run, and say why in its status and events."""
        paused, _ = self._call(self._ledger.transition(RunState.PAUSED, reason, [RunState.RUNNING]))
        if paused:
            log.error("run paused", extra={"reason": reason})
            self._call(tell(self._bus, "trainer", "guard nonfinite", reason, guard="nonfinite", action="pause"))

    def _rates(self, figures: measures.BatchFigures, step_s: float) -> dict[str, float]:
        return {
            "step_s": step_s,
            "tokens_per_s": figures.tokens / step_s,
            "samples_per_s": figures.samples / step_s,
        }

    def _left(self) -> dict[str, float]:
        left = self._call(self._intake.take_left())
        return {f"dropped_{reason}": float(left[reason]) for reason in ("stale", "fenced", "no_signal", "nonfinite")}

    def _tell_step(
        self, step: int, version: PolicyVersion, figures: measures.BatchFigures, metrics: dict[str, float]
    ) -> None:
        export_metrics(step, version, figures, metrics)
        self._context.status.values.update(step=float(step), tokens_per_s=metrics["tokens_per_s"])
        shown = ("reward_mean", "kl_mean", "entropy", "lag_mean", "samples_per_s")
        log.info("step", extra={"step": step, "version": version, **{name: round(metrics[name], 4) for name in shown}})

    # ---------------------------------------------------------------- checkpoints and the end

    def describe(self, step: int) -> CheckpointState:
        """Return what a checkpoint of ``step`` must know."""
        (status, counts), entry = self._call(self._ledger.account()), self._call(self._ledger.last_journal_entry())
        newest = self._branch.newest
        assert newest is not None
        mark = self._call(self._ledger.mark(newest))
        revision = self._call(self._live.read(self._live.revision))
        return CheckpointState(
            step=step,
            version=newest,
            cursor=status.cursor,
            position=None if mark is None else mark[1],
            counts=counts,
            journal_entry=entry,
            ranks=self._settings.trainer.ranks * self._settings.trainer.nodes,
            zero_stage=self._settings.trainer.zero_stage,
            settings_revision=self._live.revision,
            live_values={} if revision is None else revision.values,
        )

    def note_checkpoint(self, checkpoint: Checkpoint, superfluous: Sequence[Checkpoint]) -> None:
        """Do what follows from a checkpoint that is whole; see :class:`services.trainer.rank0.retention.Retention`."""
        self._retention.note(checkpoint, superfluous)

    def note_failed_checkpoint(self, step: int, error: str) -> None:
        """Tell that the checkpoint of ``step`` could not be written; the one before stays, and so does the journal."""
        self._retention.note_failed(step, error)

    def finish(self, engine: TrainingEngine) -> None:
        """Write the final policy in Hugging Face form, adapters merged in, and these beside it."""
        folder = self._settings.run_folder / "policy"
        export(engine.model, engine.tensors(), self._settings.policy, folder)
        if self._settings.policy.lora.rank:
            factors, configuration = dict(engine.factors()), file_configuration(engine.model)
            export_adapter(factors, configuration, self._settings.run_folder / "adapter")
            self._retention.note_policy(self._settings.run_folder / "adapter")
        self._retention.note_policy(folder)
        self._context.status.state = "waiting"
        log.info("final policy written", extra={"folder": str(folder)})

    async def is_over(self) -> bool:
        """Whether nothing is left to train: the run reached its last step, or was stopped for good."""
        return (await self._ledger.status()).state in ENDED

    async def clean_up(self) -> None:
        """Stop the intake and what is exported, let what is being stored be finished while there is time, and serve no more weights."""
        if self._filling is not None:
            self._filling.cancel()
        self._exporting.cancel()
        await asyncio.gather(self._exporting, return_exceptions=True)
        await asyncio.to_thread(self._retention.close, max(0.0, seconds_left() - _CLOSE_S))
        await asyncio.to_thread(self._publication.close)
