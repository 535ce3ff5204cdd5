"""The training loop, in the order of the algorithm. Every rank runs it; rank 0 also leads (see ``lead``).

::

    order = orders.next()                                  # a batch that is whole, fresh and unfenced
    learner.learn(batch):                                  # see ``algorithm/update``; by default, GRPO:
        advantages = group_advantages(rewards)             # the group is its own baseline
        for micro_batch in plan(rows, tokens, ranks):      # hard token cap, equal counts on all ranks
            backward(clipped_ratio(policy, behavior, advantages) / tokens of the global batch)
        step(learning_rate)
    probe = prober.next()                                  # logprobs that replicas check the version with, now and then
    lead.commit(batch, probe)                              # journal and version, one transaction
    every N steps: checkpoint                              # then the journal before it is forgotten

A batch whose loss or gradient is not finite leaves the bus as dropped:nonfinite and nothing is committed, and several in
a row pause the run; a checkpoint that
storage refuses is tried again at the next interval, and the journal is kept until one is whole.

A resumed trainer loads the newest whole checkpoint and replays the journal through the same :meth:`Trainer.update`,
without publishing; a rollback is such an order to load in the middle of the run. The loop knows no bus: it asks ``lead``, which other ranks do not have.
"""

import dataclasses
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from services.trainer.algorithm.step_totals import NotFinite
from services.trainer.algorithm.update import Learner, Reference
from services.trainer.checkpoint import local_store
from services.trainer.checkpoint.manifests import CheckpointFile, CheckpointState
from services.trainer.checkpoint.signatures import UNSIGNED, open_signer
from services.trainer.metrics import Phases
from services.trainer.model.engine import TrainingEngine
from services.trainer.rank0.commands import Command, CommandKind, agree, share
from services.trainer.rank0.probe import Prober
from shared.bus.messages import Experience, Probe, StepPlan
from shared.errors import SettingsError
from shared.settings import Settings

log = logging.getLogger(__name__)


class Leading(Protocol):
    """What rank 0 does beside the loop; see :class:`services.trainer.rank0.lead.Lead`."""

    def next_order(self, step: int, phases: Phases) -> Command:
        """Return the next order; IDLE when there was nothing for a while."""
        ...

    def limit(self, vocabulary: int, context_tokens: int) -> None:
        """Take groups only of token ids below ``vocabulary`` and of sequences within ``context_tokens`` (0: of any length)."""
        ...

    def note_tried(self, cause: str = "") -> None:
        """Note that the group of a TRY order was run, or that the trainer ends by ``cause``."""
        ...

    def is_published(self, step: int) -> bool:
        """Whether the weights of ``step`` are the ledger's newest version already, where replicas can get them."""
        ...

    def publish(self, engine: TrainingEngine, step: int, probe: Probe | None) -> None:
        """Publish the weights of ``step``, which is committed already, as a new version."""
        ...

    def ready(self) -> None:
        """Say that training can begin."""
        ...

    def commit(
        self,
        engine: TrainingEngine,
        step: int,
        measured: dict[str, float],
        plan: StepPlan,
        probe: Probe | None,
        phases: Phases,
    ) -> bool:
        """Publish the weights of ``step`` and move its batch to the journal, with its plan; False when a rollback forbids it."""
        ...

    def describe(self, step: int) -> CheckpointState:
        """Return what a checkpoint of ``step`` must know."""
        ...

    def note_checkpoint(
        self, checkpoint: local_store.Checkpoint, superfluous: Sequence[local_store.Checkpoint]
    ) -> None:
        """Tell the ledger, delete older checkpoints that it lets go, and forget the journal that this one covers."""
        ...

    def skip(self, reason: str, detail: str) -> None:
        """Let the batch of the last order leave the bus untrained, counted under ``dropped:<reason>``."""
        ...

    def notify(self, name: str, detail: str, **fields: float) -> None:
        """Write an event for people."""
        ...

    def note_self_test(self, part: str, outcome: str) -> None:
        """Have the run's status say how the self-test of ``part`` went."""
        ...

    def pause(self, reason: str) -> None:
        """Pause the run: something is wrong that a person should look at."""
        ...

    def note_failed_checkpoint(self, step: int, error: str) -> None:
        """Tell that the checkpoint of ``step`` could not be written."""
        ...

    def finish(self, engine: TrainingEngine) -> None:
        """Write the final policy."""
        ...


class Trainer:
    """One rank."""

    def __init__(
        self,
        engine: TrainingEngine,
        settings: Settings,
        lead: Leading | None,
        critic: TrainingEngine | None = None,
        reference: Reference | None = None,
    ) -> None:
        self._engine = engine
        self._critic = critic
        self._settings = settings
        self._lead = lead
        self._phases = Phases(engine.device)
        self._learner = Learner(engine, settings, self._phases, critic, reference)
        every, context = settings.internal.probe_every_versions, settings.rollout.vllm.max_model_len
        self._prober = Prober(engine, settings.run.seed, every, context)
        self._root = settings.run_folder / "checkpoints"
        self._signer = open_signer(settings) if lead is not None else UNSIGNED
        self._checkpointed_step = 0
        self._skipped = 0
        self._differs = False
        """Whether a replay could not repeat a step to the bit, so that no version has these weights."""
        self.step = 0

    def run(self) -> None:
        """Train until told to stop."""
        ready = False
        while True:
            order = share(self._next_order(), self._engine.device)
            if order.kind in (CommandKind.IDLE, CommandKind.TRAIN) and not ready:
                ready = self._get_ready()
            if order.kind is CommandKind.STOP:
                break
            if order.kind is CommandKind.LOAD:
                self._load(Path(order.folder))
                ready = False
            elif order.kind is CommandKind.REPLAY:
                self._replay(order)
            elif order.kind is CommandKind.TRAIN:
                self._train(order.groups, order.lags, order.learning_rate)
            elif order.kind is CommandKind.TRY:
                self._try(order)
            elif order.kind is CommandKind.CHECKPOINT:
                self._checkpoint_new()
        self._checkpoint_new()

    def _next_order(self) -> Command | None:
        return self._lead.next_order(self.step, self._phases) if self._lead is not None else None

    def _get_ready(self) -> bool:
        published = self._lead.is_published(self.step) if self._lead is not None else None
        if not agree(published, self._engine.device) or self._differs:
            probe = self._prober.next()
            if self._lead is not None:
                self._lead.publish(self._engine, self.step, probe)
            else:
                self._take_part()
            self._differs = False
        if self._lead is not None:
            self._lead.ready()
        if self.step >= self._settings.run.steps:
            self._finish()
        self._phases.take()  # the replay's seconds are no step's
        return True

    def _train(self, batch: Sequence[Experience], lags: Sequence[int], peak: float | None = None) -> None:
        try:
            measured = self.update(batch, lags, peak)
        except NotFinite as error:
            self._skip(error)
            return
        self._skipped = 0
        with self._phases.measure("probe"):
            probe = self._prober.next()
        committed, plan = None, self._learner.plan
        if self._lead is not None:
            assert plan is not None
            committed = self._lead.commit(self._engine, self.step, measured, plan, probe, self._phases)
        else:
            self._take_part()
        if not agree(committed, self._engine.device):
            log.info("step left out: the run was rolled back", extra={"step": self.step})
            return  # the next order is to load
        if self.step % self._settings.trainer.checkpoint_every_steps == 0 or self.step == self._settings.run.steps:
            self._checkpoint()
        if self.step == self._settings.run.steps:
            self._finish()

    def update(
        self,
        batch: Sequence[Experience],
        lags: Sequence[int],
        peak: float | None = None,
        repeated: StepPlan | None = None,
    ) -> dict[str, float]:
        """Make one step from ``batch``, whose groups have ``lags``; return what it measured, over all ranks.

        ``peak`` is the peak learning rate where it was changed while the run goes on, ``repeated`` the plan of a replayed step.
        """
        measured = self._learner.learn(batch, lags, self.step + 1, peak, repeated)
        self.step += 1
        return measured

    def _try(self, order: Command) -> None:
        """Run a group alone that was in the batch when the trainer died; it may die again, which the bus has counted."""
        cause = ""
        try:
            self._learner.try_out(order.groups)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise
        finally:
            if self._lead is not None:
                self._lead.note_tried(cause)

    def _replay(self, order: Command) -> None:
        """Repeat a step of the journal, to the bit where its plan is known and can be followed."""
        self.update(order.groups, order.lags, order.learning_rate, order.plan)
        made, known = self._learner.plan, order.plan
        if made is None or made == known or (known is None and not made.misfits):
            return
        self._differs = True
        detail = (
            f"step {self.step} was replayed in other forward passes than it was made in ({_words(made)}; in the journal: "
            f"{'not known' if known is None else _words(known)}), so its weights are published again as a new version"
        )
        log.warning("replay differs", extra={"detail": detail})
        if self._lead is not None:
            self._lead.notify("replay differs", detail, step=self.step)

    def _skip(self, error: NotFinite) -> None:
        """Leave a batch out of the run; pause it, or stop, where that is no way on."""
        self._skipped += 1
        if self._lead is not None:
            self._lead.skip("nonfinite", str(error))
        dist.barrier()
        if error.touched:
            raise RuntimeError(
                f"{error}, after some of its weights had moved: nothing was committed, the batch is dropped, and the "
                "trainer starts again from its checkpoint and journal"
            ) from error
        if self._skipped > self._settings.trainer.max_skipped_steps:
            self._skipped = 0
            if self._lead is not None:
                self._lead.pause(
                    f"guard nonfinite: expected at most {self._settings.trainer.max_skipped_steps} batches in a row that "
                    f"are not finite (trainer.max_skipped_steps), found one more; the last: {error}: lower "
                    "trainer.learning_rate, or roll back, then resume"
                )

    def _take_part(self) -> None:
        self._engine.take_part(factors=self._settings.publishes_adapters)

    def _load(self, folder: Path) -> None:
        (found,) = [checkpoint for checkpoint in local_store.find(self._root) if checkpoint.folder == folder]
        local_store.check_ranks(found, self._engine.ranks, self._settings.trainer.zero_stage)
        local_store.check_base(found, self._settings.policy)
        self._engine.load(folder / "engine")
        if self._critic is not None:
            if not (folder / "critic").is_dir():
                raise SettingsError(
                    f"expected a critic in the checkpoint {folder}, found none: change algorithm.advantage back to what "
                    "the run was started with"
                )
            self._critic.load(folder / "critic")
        if found.state.kl_coefficient is not None:
            self._learner.kl_coefficient = found.state.kl_coefficient
        self._differs = False
        self.step = self._checkpointed_step = found.state.step
        log.info("checkpoint loaded", extra={"folder": str(folder), "step": self.step})

    def _checkpoint_new(self) -> None:
        """Write a checkpoint of what none has yet."""
        if self.step > self._checkpointed_step:
            self._checkpoint()

    def _checkpoint(self) -> None:
        with self._phases.measure("checkpoint"):
            written = local_store.beside(self._root, self.step)
            error = self._engine.save(written / "engine")
            if self._critic is not None:
                error = error or self._critic.save(written / "critic")
            refused = self._engine.on_any_rank(bool(error))
            files = {} if refused else self._written()
            if self._lead is not None and not refused:
                error = self._make_whole(self._lead, files)
            refused = agree(refused or bool(error) if self._lead is not None else None, self._engine.device)
            if refused and self._lead is not None:
                shutil.rmtree(written, ignore_errors=True)
                self._lead.note_failed_checkpoint(self.step, error or "another rank could not write its part")
            dist.barrier()
        if not refused:
            self._checkpointed_step = self.step

    def _written(self) -> dict[Path, CheckpointFile]:
        """Return the digests of what all ranks wrote; every rank calls it."""
        critic = self._critic.written() if self._critic is not None else {}
        return {**self._engine.written(), **critic}

    def _make_whole(self, lead: Leading, files: dict[Path, CheckpointFile]) -> str:
        """Make what all ranks wrote a checkpoint; return what storage refused, or ""."""
        state = dataclasses.replace(
            lead.describe(self.step),
            kl_coefficient=self._learner.kl_coefficient,
            adapter_of=local_store.base_of(self._settings.policy),
        )
        try:
            checkpoint = local_store.make_whole(self._root, state, files, self._signer)
        except OSError as error:
            return str(error)
        lead.note_checkpoint(checkpoint, local_store.superfluous(self._root, self._settings.trainer.keep_last))
        return ""

    def _finish(self) -> None:
        if self._lead is not None:
            self._lead.finish(self._engine)
            return
        self._engine.take_part()
        if self._settings.policy.lora.rank:
            self._engine.take_part(factors=True)


def _words(plan: StepPlan) -> str:
    return f"trainer.micro_batch_tokens {plan.micro_batch_tokens}, {len(plan.misfits)} did not fit into memory"
