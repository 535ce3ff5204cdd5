"""The training loop, in the order of the algorithm. Every rank runs it; rank 0 also leads (see ``lead``).

::

    order = orders.next()                                  # a batch that is whole, fresh and unfenced
    advantages = group_advantages(rewards)                 # GRPO: the group is its own baseline
    for micro_batch in plan(rows, tokens, ranks):          # hard token cap, equal counts on all ranks
        backward(clipped_ratio(policy, behavior, advantages) / tokens of the global batch)
    step(learning_rate)
    lead.commit(batch)                                     # journal and version, one transaction
    every N steps: checkpoint                              # then the journal before it is forgotten

A resumed trainer loads the newest whole checkpoint and replays the journal through the same :meth:`Trainer.update`,
without publishing. The loop knows no bus: it asks ``lead``, which other ranks do not have.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from services.trainer import checkpoints
from services.trainer.advantages import group_advantages
from services.trainer.engine import TrainingEngine
from services.trainer.losses import clipped_ratio, kl_k3
from services.trainer.measures import Phases, TokenSums
from services.trainer.orders import Kind, Order, share
from services.trainer.packing import MicroBatch, Row, plan
from services.trainer.schedule import learning_rate
from shared.messages import Experience
from shared.settings import Settings

log = logging.getLogger(__name__)


class Leading(Protocol):
    """What rank 0 does beside the loop; see :class:`services.trainer.lead.Lead`."""

    def next_order(self, step: int, phases: Phases) -> Order:
        """Return the next order; IDLE when there was nothing for a while."""
        ...

    def ready(self, engine: TrainingEngine, step: int) -> None:
        """Publish the weights of ``step`` unless they are the ledger's newest already."""
        ...

    def commit(self, engine: TrainingEngine, step: int, measured: dict[str, float], phases: Phases) -> None:
        """Publish the weights of ``step`` and move its batch to the journal."""
        ...

    def describe(self, step: int) -> checkpoints.CheckpointState:
        """Return what a checkpoint of ``step`` must know."""
        ...

    def note_checkpoint(self, checkpoint: checkpoints.Checkpoint, gone: Sequence[checkpoints.Checkpoint]) -> None:
        """Tell the ledger, and forget the journal that the checkpoint covers."""
        ...

    def finish(self, engine: TrainingEngine) -> None:
        """Write the final policy."""
        ...


class Trainer:
    """One rank."""

    def __init__(self, engine: TrainingEngine, settings: Settings, lead: Leading | None) -> None:
        self._engine = engine
        self._settings = settings
        self._lead = lead
        self._phases = Phases()
        self._root = settings.run_folder / "checkpoints"
        self._checkpointed_step = 0
        self.step = 0

    def run(self) -> None:
        """Train until told to stop."""
        ready = False
        while True:
            order = share(self._next_order(), self._engine.device)
            if order.kind in (Kind.IDLE, Kind.TRAIN, Kind.STOP) and not ready:
                ready = self._get_ready()
            if order.kind is Kind.STOP:
                break
            if order.kind is Kind.LOAD:
                self._load(Path(order.folder))
            elif order.kind is Kind.REPLAY:
                self.update(order.groups)
            elif order.kind is Kind.TRAIN:
                self._train(order.groups)
        if self.step > self._checkpointed_step:
            self._checkpoint()

    def _next_order(self) -> Order | None:
        return self._lead.next_order(self.step, self._phases) if self._lead is not None else None

    def _get_ready(self) -> bool:
        if self._lead is not None:
            self._lead.ready(self._engine, self.step)
        if self.step >= self._settings.run.steps:
            self._finish()
        self._phases.take()  # the replay's seconds are no step's
        return True

    def _train(self, batch: Sequence[Experience]) -> None:
        measured = self.update(batch)
        if self._lead is not None:
            self._lead.commit(self._engine, self.step, measured, self._phases)
        if self.step % self._settings.trainer.checkpoint_every_steps == 0 or self.step == self._settings.run.steps:
            self._checkpoint()
        if self.step == self._settings.run.steps:
            self._finish()

    def update(self, batch: Sequence[Experience]) -> dict[str, float]:
        """Make one optimizer step from ``batch``; return what it measured, over all ranks."""
        settings = self._settings
        with self._phases.measure("forward_backward"):
            rows = [_row(experience, settings) for experience in batch]
            shares = plan(rows, settings.trainer.micro_batch_tokens, self._engine.ranks)
            tokens = sum(len(sample.token_ids) for row in rows for sample in row.samples)
            sums = TokenSums(self._engine.device)
            mine = shares[dist.get_rank()]
            for number, micro_batch in enumerate(mine, start=1):
                self._accumulate(micro_batch, tokens, sums, last=number == len(mine))
        with self._phases.measure("optimizer"):
            rate = learning_rate(settings.trainer, self.step + 1, settings.run.steps)
            grad_norm = self._engine.step(rate)
            measured = sums.over_ranks(tokens)
        if not math.isfinite(measured["loss"]) or not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"expected a finite loss and gradient norm at step {self.step + 1}, found {measured['loss']} and "
                f"{grad_norm}: nothing was committed; lower trainer.learning_rate"
            )
        self.step += 1
        return {**measured, "grad_norm": grad_norm, "learning_rate": rate}

    def _accumulate(self, batch: MicroBatch, tokens: int, sums: TokenSums, *, last: bool) -> None:
        device, algorithm = self._engine.device, self._settings.algorithm
        behavior_logprobs_N = torch.from_numpy(batch.behavior_logprobs_N).to(device)
        advantages_N = torch.from_numpy(batch.advantages_N).to(device)
        out = self._engine.forward(batch)
        policy_loss = clipped_ratio(
            out.policy_logprobs_N, behavior_logprobs_N, advantages_N, algorithm.clip_low, algorithm.clip_high
        )
        loss = policy_loss.sum / tokens
        self._engine.backward(loss * self._engine.ranks, last=last)
        with torch.no_grad():
            kl_N = kl_k3(behavior_logprobs_N, out.policy_logprobs_N)
            sums.add(loss, kl_N, out.entropy_N, policy_loss.clipped_N)

    def _load(self, folder: Path) -> None:
        (found,) = [checkpoint for checkpoint in checkpoints.find(self._root) if checkpoint.folder == folder]
        checkpoints.check_ranks(found, self._engine.ranks, self._settings.trainer.zero_stage)
        self._engine.load(folder / "engine")
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(found.state.random_state), dtype=torch.uint8))
        self.step = self._checkpointed_step = found.state.step
        log.info("checkpoint loaded", extra={"folder": str(folder), "step": self.step})

    def _checkpoint(self) -> None:
        with self._phases.measure("checkpoint"):
            written = checkpoints.beside(self._root, self.step)
            self._engine.save(written / "engine")
            dist.barrier()
            if self._lead is not None:
                checkpoint = checkpoints.make_whole(self._root, self._lead.describe(self.step))
                self._lead.note_checkpoint(checkpoint, checkpoints.prune(self._root, self._settings.trainer.keep_last))
            dist.barrier()
        self._checkpointed_step = self.step

    def _finish(self) -> None:
        if self._lead is not None:
            self._lead.finish(self._engine)


def _row(experience: Experience, settings: Settings) -> Row:
    advantages = group_advantages(experience.rewards, settings.algorithm.scale_advantages)
    return Row(experience.group.prompt_token_ids, experience.group.samples, tuple(advantages.tolist()))
