"""The training loop: every rank executes the commands of ``rank0/driver`` in order.

::

    command = share(mailbox.receive())                         # rank 0 receives it, and broadcasts it
    TRAIN:
        measured = learner.learn(batch)                        # see ``algorithm/update``
        weights = artifacts.publish(version)                   # replicas can get them; the driver commits
    FREE: memory goes to the host, and comes back before the next command that needs it
    CHECKPOINT: copy; a thread writes it beside the next steps, meets those of other ranks, and completes it
    LOAD, REPLAY: back to the ledger's step
    mailbox.send(result)

It uses no bus.
"""

import collections
import contextlib
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from penstock.services.trainer.algorithm.estimates import Reference
from penstock.services.trainer.algorithm.step_totals import NotFinite
from penstock.services.trainer.algorithm.update import Learner
from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.manifests import CheckpointState
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.held_tensors import components
from penstock.services.trainer.model.memory.residency import Residency
from penstock.services.trainer.model.memory.storages import Storages
from penstock.services.trainer.model.saving.writer import Written
from penstock.services.trainer.phases import Phases
from penstock.services.trainer.rank0.artifacts import Artifacts
from penstock.services.trainer.rank0.mailbox.commands import Command, CommandKind, decode_all, share
from penstock.services.trainer.rank0.mailbox.queues import Mailbox, NoMailbox
from penstock.services.trainer.rank0.mailbox.results import (
    Freed,
    Published,
    Replayed,
    Result,
    StepMade,
    StepSkipped,
    StopRequested,
)
from penstock.services.trainer.rank0.probe import Prober
from penstock.services.trainer.rank_group import writers_group
from penstock.shared.bus.messages import Experience, PolicyVersion, StepPlan
from penstock.shared.errors import SettingsError
from penstock.shared.files.checkpoint_folder import CHECKPOINTS
from penstock.shared.settings import Settings

log = logging.getLogger(__name__)

_NICE = 10
"""Of the threads that write checkpoints."""
_WITHOUT_MODEL = (CommandKind.IDLE, CommandKind.WAIT, CommandKind.STOP, CommandKind.FREE)


class Trainer:
    def __init__(
        self,
        engine: TrainingEngine,
        settings: Settings,
        mailbox: Mailbox | NoMailbox,
        artifacts: Artifacts,
        critic: TrainingEngine | None = None,
        reference: Reference | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._critic = critic
        self._settings = settings
        self._mailbox = mailbox
        self._artifacts = artifacts
        self._stop_requested = stop_requested
        self._frozen = reference if isinstance(reference, nn.Module) else None
        self._phases = Phases(engine.device, self._components)
        self._learner = Learner(engine, settings, self._phases, critic, reference)
        self._prober = Prober(engine, settings)
        self._root = settings.run_folder / CHECKPOINTS
        self._residencies = [part.residency for part in (engine, critic) if part is not None]
        if isinstance(reference, nn.Module):
            self._residencies.append(Residency(reference, engine.device))
        self._rung, self._is_away = 0, False
        self._failure: BaseException | None = None
        """Of the thread that writes a checkpoint."""
        self.step = 0

    def run(self) -> bool:
        """Execute commands until STOP or FINISH; return whether the run is over."""
        while True:
            with self._phases.measure("wait"):
                command = share(self._mailbox.receive())
            if command.kind in (CommandKind.STOP, CommandKind.FINISH):
                return command.kind is CommandKind.FINISH
            if self._failure is not None:
                raise self._failure
            result = self.execute(command)
            if self._engine.on_any_rank(self._stop_requested()):
                self._mailbox.send(StopRequested())
            self._mailbox.send(result)

    def execute(self, command: Command) -> Result:
        # First, as memory that returns to the driver waits for all copies to the device.
        is_step = command.kind in (CommandKind.TRAIN, CommandKind.TRY)
        is_freed = is_step and self._artifacts.free(command.rung)
        if self._is_away and command.kind not in _WITHOUT_MODEL:
            self._reload()
        match command.kind:
            case CommandKind.FREE:
                return self._free(command.rung, command.offload_bytes)
            case CommandKind.TRAIN:
                return self._train(command, is_freed=is_freed)
            case CommandKind.CHECKPOINT:
                return self._checkpoint(command)
            case CommandKind.TRY:
                self._try(command, is_freed=is_freed)
            case CommandKind.EXPORT:
                return self._artifacts.export(self._engine)
            case CommandKind.LOAD | CommandKind.REPLAY | CommandKind.PUBLISH | CommandKind.WAIT:
                result = self._open(command)
                self._phases.take()
                return result
        return Result()

    def _free(self, rung: int, needed_bytes: float | None) -> Freed:
        """Free the device's memory for generation, down to ``rung`` of the ladder; ``needed_bytes`` at rung 3.

        If it is free already, a higher rung frees more; the memory is reported only the first time, when all is there.
        """
        if self._is_away and rung <= self._rung:
            return Freed({})
        memory, moved_bytes = {} if self._is_away else self._memory(), 0
        with self._phases.measure("offload"):
            for residency in self._residencies:
                needed = None if needed_bytes is None else max(0.0, needed_bytes - moved_bytes)
                moved_bytes += residency.free(rung, needed)
        self._rung, self._is_away = rung, True
        return Freed(memory, moved_bytes)

    def _memory(self) -> dict[str, float]:
        memory = collections.Counter[str]()
        for residency in self._residencies:
            memory.update(residency.memory())
        return {**memory, "snapshot": float(Storages(self._engine.device).add(self._artifacts.snapshots))}

    def _reload(self) -> None:
        with self._phases.measure("reload"):
            for residency in self._residencies:
                residency.restore()
        self._is_away = False

    def _open(self, command: Command) -> Result:
        match command.kind:
            case CommandKind.LOAD:
                self._load(Path(command.folder))
            case CommandKind.REPLAY:
                return self._replay(command)
            case CommandKind.PUBLISH:
                return self._publish(command)
        return Result()

    def _try(self, command: Command, *, is_freed: bool) -> None:
        self._learner.try_out(command.groups, command.contexts)
        if is_freed:
            self._artifacts.offer_again(self._engine)

    def _train(self, command: Command, *, is_freed: bool) -> StepMade | StepSkipped:
        """``is_freed``: the snapshot is away, and is offered again if no step is made."""
        self._rung = command.rung
        with self._phases.measure("probe"):
            self._prober.prepare(command.groups)
        self._learner.offer(command.routes)
        try:
            measured = self.update(command.groups, command.lags, command.learning_rate, contexts=command.contexts)
            if command.held_out:
                measured |= self._learner.figures_of(decode_all(command.held_out))
        except NotFinite as error:
            if is_freed and not error.touched:
                self._artifacts.offer_again(self._engine)
            return StepSkipped(str(error), error.touched)
        published, plan = self._publish(command), self._learner.plan
        assert plan is not None
        if self._learner.shows(self.step):
            logprobs = dict(pair for part in self._engine.gathered(self._learner.logprobs) for pair in part.items())
            self._artifacts.record_tokens(command.version, command.groups[-1], logprobs)
        memory, samples = self._phases.take_memory(), self._engine.gathered(self._phases.take_samples())
        return StepMade(published, measured, plan, self._phases.take(), memory, samples)

    def _parts(self) -> dict[str, TrainingEngine]:
        """Return the engines, by their folders in checkpoints."""
        return {"engine": self._engine} if self._critic is None else {"engine": self._engine, "critic": self._critic}

    def _components(self) -> dict[str, float]:
        return components(self._engine, self._critic, self._frozen, self._artifacts.snapshots)

    def update(
        self,
        batch: Sequence[Experience],
        lags: Mapping[PolicyVersion, int],
        peak: float | None = None,
        repeated: StepPlan | None = None,
        contexts: Sequence[int] = (),
    ) -> dict[str, float]:
        """Make one step from ``batch`` with ``lags``; return its figures over all ranks.

        ``peak`` is a changed peak learning rate, ``repeated`` a replayed step's plan, ``contexts`` as in ``learn``.
        """
        measured = self._learner.learn(batch, lags, self.step + 1, peak, repeated, contexts)
        self.step += 1
        return measured

    def _publish(self, command: Command) -> Published:
        with self._phases.measure("probe"):
            probe = self._prober.next(command.texts)
        with self._phases.measure("snapshot"):
            weights = self._artifacts.publish(self._engine, command.version, self.step)
        return Published(weights, probe)

    def _load(self, folder: Path) -> None:
        checkpoint = local_store.read(folder)
        assert checkpoint is not None
        local_store.check_readable(checkpoint, self._settings.policy)
        trainer, state = self._settings.trainer, checkpoint.state
        of_others = (state.zero_stage, state.expert_parallel) != (trainer.zero_stage, trainer.expert_parallel) or (
            trainer.zero_stage > 0 and state.ranks != self._engine.ranks
        )
        self._engine.load(folder / "engine", of_others=of_others)
        self._prober.prepare((), replays=True)
        if self._critic is not None:
            if not (folder / "critic").is_dir():
                raise SettingsError(
                    f"the checkpoint {folder} has no critic: set algorithm.advantage as at the start of the run"
                )
            self._critic.load(folder / "critic", of_others=of_others)
        self.step = 0 if folder.name == local_store.START else checkpoint.state.step
        log.info("checkpoint loaded", extra={"folder": str(folder), "step": self.step})

    def _replay(self, command: Command) -> Replayed:
        """Repeat a journalled step, bit-identically with its plan and settings; its weights are published afterwards."""
        self._artifacts.free(self._rung)
        self._prober.prepare(command.groups, replays=True)
        self._learner.offer(command.routes)
        self.update(command.groups, command.lags, command.learning_rate, command.plan)
        made, known = self._learner.plan, command.plan
        if made is not None and (known is None or not known.settings):
            made = dataclasses.replace(made, settings="")  # the step is from an older Penstock
        if made is None or made == known or (known is None and not made.misfits):
            return Replayed("")
        if known is not None and made.settings != known.settings:
            return Replayed(
                f"step {self.step} was replayed with other settings than it was made with ([algorithm], or of [trainer] "
                "those of optimizer, learning rate and ZeRO stage), so its weights are published again as a new version"
            )
        return Replayed(
            f"step {self.step} was replayed in other forward passes than it was made in, or routed otherwise ({_words(made)}; in the journal: "
            f"{'not known' if known is None else _words(known)}), so its weights are published again as a new version"
        )

    def _checkpoint(self, command: Command) -> Result:
        with self._phases.measure("checkpoint"):
            folder = local_store.beside(self._root, self.step)
            writes = [part.save(folder / name) for name, part in self._parts().items()]
        group = writers_group() if self._engine.ranks > 1 else None
        work = functools.partial(self._write, command.state, writes, group)
        threading.Thread(target=work, name="checkpoint", daemon=True).start()
        return Result()

    def _write(
        self,
        state: CheckpointState | None,
        writes: Sequence[Callable[[], Written]],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Write a checkpoint, in a thread of its own; it counts once the files of every rank of ``group`` are durable."""
        try:
            give_way()
            written = [write() for write in writes]
            every: list[Any] = [written]
            if group is not None:
                every *= self._engine.ranks
                dist.all_gather_object(every, written, group=group)
            of_ranks: list[Written] = [part for parts in every for part in parts]
            files = {path: file for part in of_ranks for path, file in part.files.items()}
            refusal = next((part.error for part in of_ranks if part.error), "")
            self._mailbox.send_saved(self._artifacts.complete(state, files, refusal))
        except BaseException as error:  # noqa: BLE001 (the outermost edge of this thread; the training thread raises it)
            self._failure = error


def give_way() -> None:
    """Let training's threads have the processors before this one and those that it starts."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _words(plan: StepPlan) -> str:
    return f"trainer.micro_batch_tokens {plan.micro_batch_tokens}, {len(plan.misfits)} did not fit into memory"
