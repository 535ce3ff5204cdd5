"""What happens to the weights in one step, in the order of the algorithm. Every rank calls it with the same batch.

::

    minibatches = shares of the batch's groups                    drawn by (run.seed, step); one: the batch as it is
    look        proximal, reference logprobs and values           forward passes without gradients, where needed
    assign      advantages of all tokens                          see ``token_advantages``
    for epoch, for minibatch:
        backward(objective / divisor of the minibatch over all ranks); step          the policy
        backward(value loss / tokens); step                                          the critic, where there is one

A *step* is what is made of one batch and committed as one version: ``epochs × minibatches`` updates of the optimizer, one by
default. All of it follows from the batch, the lags, the step's number, the weights and the step's *plan*: how its samples were spread
over forward passes, and which of these did not fit. A replay that is given the plan repeats the step to the bit.

A micro-batch that does not fit into memory on one rank is cut in two on all of them and tried again; a single sample that
does not fit is left out (it counts in the divisor, and adds no gradient). A gradient that is not finite reaches no weight.
It knows no bus and publishes nothing.
"""

import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from services.trainer.algorithm.aggregation import divisor
from services.trainer.algorithm.diagnostics import StepSums, explained_variance
from services.trainer.algorithm.dpo import best_and_worst
from services.trainer.algorithm.kl import next_coefficient
from services.trainer.algorithm.objective import Objective, objective
from services.trainer.algorithm.schedule import critic_learning_rate, learning_rate
from services.trainer.algorithm.step_totals import Tally, check_finite
from services.trainer.algorithm.token_advantages import assign, shaped_rewards
from services.trainer.batch import oom_split
from services.trainer.batch import token_data as known
from services.trainer.batch.flops import BACKWARD
from services.trainer.batch.packing import MicroBatch, PackedRow, plan
from services.trainer.batch.token_data import LossInputs
from services.trainer.metrics import Phases, utilisation
from services.trainer.model import adapter
from services.trainer.model.critic import value_loss
from services.trainer.model.engine import TrainingEngine
from services.trainer.model.forward_passes import ForwardPasses, digest
from services.trainer.model.layers.logits import TokenLogprobs
from shared.bus.messages import Experience, Float32Array, StepPlan
from shared.settings import Settings

log = logging.getLogger(__name__)

Reference = Callable[[MicroBatch], TokenLogprobs]
"""The frozen initial policy: a copy of it, or the policy without its adapter. Every rank calls it alike."""


class AdapterOff:
    """The reference of a policy with adapters: the same weights without them, so no copy is held."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine

    def __call__(self, batch: MicroBatch) -> TokenLogprobs:
        """Return the initial policy's logprobs of ``batch``'s trained tokens."""
        with adapter.off(self._engine.policy):
            found: TokenLogprobs = self._engine.evaluate(batch)
            return found


@dataclasses.dataclass(frozen=True, slots=True)
class Minibatch:
    """This rank's part of one update, and how much all ranks have together."""

    inputs: list[LossInputs]
    """Cut smaller where they did not fit."""
    rows: Mapping[int, PackedRow]
    """The row of each sample, by its place in the batch."""
    tokens: int
    samples: int


class Learner:
    """The weights of this rank: the policy's, and the critic's and the reference's where the algorithm needs them."""

    def __init__(
        self,
        policy: TrainingEngine,
        settings: Settings,
        phases: Phases,
        critic: TrainingEngine | None = None,
        reference: Reference | None = None,
    ) -> None:
        self._policy = policy
        self._critic = critic
        self._reference = reference
        self._settings = settings
        self._algorithm = settings.algorithm
        self._phases = phases
        self.kl_coefficient = settings.algorithm.kl.coefficient
        """What a nat away from the reference costs in the next step; part of a checkpoint."""
        self.plan: StepPlan | None = None
        """How the newest step was laid out, and what of it did not fit into memory."""

    def learn(
        self,
        batch: Sequence[Experience],
        lags: Sequence[int],
        step: int,
        peak: float | None = None,
        repeated: StepPlan | None = None,
    ) -> dict[str, float]:
        """Make step ``step`` (1 is the first) from ``batch``; return what it measured, over all ranks.

        Args:
            batch: the groups, the same on every rank.
            lags: the lag of each group, in steps.
            step: the number of this step.
            peak: the peak learning rate of this step; none: the settings'.
            repeated: the plan of a step that is replayed. It is followed unless ``trainer.micro_batch_tokens`` was lowered since
                or memory is shorter now; then :attr:`plan` differs from it.

        Raises:
            NotFinite: a loss or gradient is not, on every rank alike.
        """
        rewards = [shaped_rewards(e, self._algorithm, self._settings.sampling.max_new_tokens) for e in batch]
        lags_M = [lag for lag, e in zip(lags, batch, strict=True) for _ in e.group.samples]
        pairs, shared = self._algorithm.loss == "dpo", self._policy.shares_prompts
        rows = _rows(batch, rewards, pairs=pairs, shares_prompt=shared)
        minibatches, made = self._lay_out(rows, lags_M, step, repeated)
        everything = [found for minibatch in minibatches for found in minibatch.inputs]
        self._look(everything, batch)
        assign(everything, rewards, self._algorithm, self.kl_coefficient)
        rate = self._rate(step, self._settings.trainer.learning_rate if peak is None else peak)
        misfits = repeated.misfits if repeated is not None and repeated.layout == made.layout else ()
        passes = ForwardPasses(self._policy, (self._settings.run.seed, step), misfits)
        measured = self._improve(minibatches, everything, step, rate, passes)
        self.plan = dataclasses.replace(made, misfits=tuple(passes.misfits))
        return measured | self._look_back(everything, measured["reference_kl"], len(lags_M))

    def try_out(self, batch: Sequence[Experience]) -> None:
        """Run what training on ``batch`` runs, backward passes included, and change nothing; every rank calls it."""
        rewards = [shaped_rewards(e, self._algorithm, self._settings.sampling.max_new_tokens) for e in batch]
        lags_M, pairs = [0 for e in batch for _ in e.group.samples], self._algorithm.loss == "dpo"
        rows = _rows(batch, rewards, pairs=pairs, shares_prompt=self._policy.shares_prompts)
        cap, ranks = self._settings.trainer.micro_batch_tokens, self._policy.ranks
        mine = plan(rows, cap, ranks, split=not pairs, sizes=self._policy.sizes)[dist.get_rank()]
        minibatch = self._minibatch(rows, mine, lags_M)
        devices = [self._policy.device] if self._policy.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            self._look(minibatch.inputs, batch)
            assign(minibatch.inputs, rewards, self._algorithm, self.kl_coefficient)
            passes = ForwardPasses(self._policy, (self._settings.run.seed, 0))
            sums, tally = StepSums(self._policy.device), Tally(self._policy.device)
            with self._policy.gradients_discarded():
                self._backward(minibatch, sums, tally, passes)
            if self._critic is not None:
                with self._critic.gradients_discarded():
                    self._backward_critic(self._critic, minibatch, tally)

    def _rate(self, step: int, peak: float) -> float:
        if self._critic is not None and step <= self._algorithm.critic.warmup_steps:
            return 0.0
        settings = self._settings.trainer.model_copy(update={"learning_rate": peak})
        return learning_rate(settings, step, self._settings.run.steps)

    # ---------------------------------------------------------------- before the update

    def _lay_out(
        self, rows: Sequence[PackedRow], lags_M: Sequence[int], step: int, repeated: StepPlan | None
    ) -> tuple[list[Minibatch], StepPlan]:
        order = np.arange(len(rows))
        if self._algorithm.minibatches > 1:
            order = np.random.default_rng([self._settings.run.seed, step]).permutation(len(rows))
        shares = [[rows[place] for place in share] for share in np.array_split(order, self._algorithm.minibatches)]
        cap, ranks = self._settings.trainer.micro_batch_tokens, self._policy.ranks
        if repeated is not None:
            cap = min(cap, repeated.micro_batch_tokens)
        whole, sizes = self._algorithm.loss == "dpo", self._policy.sizes
        layouts = [plan(share, cap, ranks, split=not whole, sizes=sizes) for share in shares]
        rank = dist.get_rank()
        minibatches = [
            self._minibatch(*found, lags_M) for found in zip(shares, (one[rank] for one in layouts), strict=True)
        ]
        return minibatches, StepPlan(cap, digest(layouts))

    def _minibatch(self, rows: Sequence[PackedRow], mine: Sequence[MicroBatch], lags_M: Sequence[int]) -> Minibatch:
        lengths = [len(sample.token_ids) for row in rows for sample in row.samples]
        inputs = [known.of(one, lags_M, self._policy.device) for one in mine]
        return Minibatch(inputs, oom_split.rows_by_place(rows), sum(lengths), len(lengths))

    def _look(self, everything: Sequence[LossInputs], batch: Sequence[Experience]) -> None:
        if self._algorithm.proximal == "recomputed":
            with self._phases.measure("proximal"):
                for found in everything:
                    found.proximal_logprobs_N = self._policy.evaluate(found.batch).policy_logprobs_N
        if self._algorithm.reference_travels:
            known.add_reference(everything, batch)
        elif self._reference is not None:
            with self._phases.measure("reference"), torch.no_grad():
                for found in everything:
                    found.reference_logprobs_N = self._reference(found.batch).policy_logprobs_N
        if self._critic is not None:
            with self._phases.measure("critic"):
                for found in everything:
                    found.values_N = self._critic.evaluate(found.batch)

    # ---------------------------------------------------------------- the update

    def _improve(
        self,
        minibatches: Sequence[Minibatch],
        everything: Sequence[LossInputs],
        step: int,
        rate: float,
        passes: ForwardPasses,
    ) -> dict[str, float]:
        device = self._policy.device
        sums, tally, spent_s = StepSums(device), Tally(device), self._spent_s()
        for _ in range(self._algorithm.epochs):
            for minibatch in minibatches:
                self._update_policy(minibatch, rate, sums, tally, step, passes)
                if self._critic is not None:
                    self._update_critic(self._critic, minibatch, step, tally)
        measured = {**sums.over_ranks(), **tally.over_ranks(), "learning_rate": rate}
        check_finite(measured, step)
        return measured | self._utilisation(everything, self._spent_s() - spent_s)

    def _spent_s(self) -> float:
        return self._phases.seconds["forward_backward"] + self._phases.seconds["optimizer"]

    def _utilisation(self, everything: Sequence[LossInputs], seconds: float) -> dict[str, float]:
        """Return how fast this rank made the step's forward passes, backward passes and updates."""
        once = sum(found.batch.flops for found in everything)
        flops = once * (1 + BACKWARD) * self._algorithm.epochs
        return utilisation(flops, seconds, self._settings.internal.peak_tflops, self._policy.device)

    def _update_policy(
        self, minibatch: Minibatch, rate: float, sums: StepSums, tally: Tally, step: int, passes: ForwardPasses
    ) -> None:
        with self._phases.measure("forward_backward"):
            self._backward(minibatch, sums, tally, passes)
        with self._phases.measure("optimizer"):
            tally.updated(self._policy.step(rate), step)

    def _backward(self, minibatch: Minibatch, sums: StepSums, tally: Tally, passes: ForwardPasses) -> None:
        """Add the policy's gradients."""
        algorithm = self._algorithm
        parts = divisor(
            algorithm.aggregation, minibatch.tokens, minibatch.samples, self._settings.sampling.max_new_tokens
        )
        if algorithm.loss == "dpo":
            parts = max(1.0, minibatch.samples / 2)
        for wanted, last in self._objectives(minibatch, tally, passes):
            loss = wanted.sum / parts
            self._policy.backward(loss * self._policy.ranks, last=last)
            with torch.no_grad():
                sums.add(wanted.figures)
                tally.add(loss, wanted.margins_P)

    def _objectives(
        self, minibatch: Minibatch, tally: Tally, passes: ForwardPasses
    ) -> Iterator[tuple[Objective, bool]]:
        """Yield what each forward pass is to minimise, and whether it is the last; the minibatch keeps them as cut."""
        waiting, done = deque(minibatch.inputs), []
        while waiting:
            found = waiting.popleft()
            wanted, fits = passes.attempt(functools.partial(self._objective, found))
            if wanted is None:
                waiting.extendleft(reversed(self._smaller(found, minibatch.rows, fits, tally)))
                continue
            done.append(found)
            yield wanted, not waiting
        minibatch.inputs[:] = done

    def _objective(self, found: LossInputs) -> Objective:
        return objective(found, self._policy.forward(found.batch), self._algorithm, self.kl_coefficient)

    def _smaller(self, found: LossInputs, rows: Mapping[int, PackedRow], fits: bool, tally: Tally) -> list[LossInputs]:
        """Return two micro-batches for one, as every rank must; a sample that does not fit alone is left out."""
        together = 2 if self._algorithm.loss == "dpo" else 1
        samples = len(found.batch.places_S)
        if samples == 0 and not fits:
            raise torch.OutOfMemoryError(
                "expected memory for an empty forward pass, found none: lower trainer.micro_batch_tokens"
            )
        tally.split()
        if samples <= together and not fits:
            log.warning("sample left out: no memory", extra={"tokens": found.batch.tokens, "samples": samples})
            tally.left_out(samples)
            samples = 0
        if self._policy.device.type == "cuda":
            torch.cuda.empty_cache()
        if samples <= together:
            return [oom_split.part(found, rows, 0, samples), oom_split.part(found, rows, 0, 0)]
        return oom_split.halves(found, rows, together=together)

    def _update_critic(self, critic: TrainingEngine, minibatch: Minibatch, step: int, tally: Tally) -> None:
        with self._phases.measure("critic"):
            self._backward_critic(critic, minibatch, tally)
            tally.critic_updated(critic.step(critic_learning_rate(self._settings, step)), step)

    def _backward_critic(self, critic: TrainingEngine, minibatch: Minibatch, tally: Tally) -> None:
        """Add the critic's gradients."""
        for number, found in enumerate(minibatch.inputs, start=1):
            assert found.values_N is not None
            assert found.returns_N is not None
            values_N = critic.forward(found.batch)
            loss_N = value_loss(values_N, found.values_N, found.returns_N, self._algorithm.critic.clip)
            loss = loss_N.sum() / max(1, minibatch.tokens)
            critic.backward(loss * critic.ranks, last=number == len(minibatch.inputs))
            tally.add_value_loss(loss)

    def _look_back(self, everything: Sequence[LossInputs], reference_kl: float, samples: int) -> dict[str, float]:
        """Return figures of the whole step, and move the KL coefficient on."""
        found: dict[str, float] = {}
        if self._algorithm.needs_reference:
            found["kl_coefficient"] = self.kl_coefficient
        if self._critic is not None:
            returns = [one.returns_N for one in everything if one.returns_N is not None]
            values = [one.values_N for one in everything if one.values_N is not None]
            found["explained_variance"] = explained_variance(torch.cat(returns), torch.cat(values))
        kl = self._algorithm.kl
        if kl.target:
            self.kl_coefficient = next_coefficient(self.kl_coefficient, reference_kl, kl.target, samples)
        return found


def _rows(
    batch: Sequence[Experience], rewards: Sequence[Float32Array], *, pairs: bool, shares_prompt: bool
) -> list[PackedRow]:
    """Return a row a group; with ``pairs``, its best and its worst sample only (none: a row that trains nothing)."""
    rows, first = [], 0
    for experience, rewards_S in zip(batch, rewards, strict=True):
        samples = experience.group.samples
        chosen = tuple(range(len(samples)))
        if pairs:
            chosen = best_and_worst(rewards_S) or ()
        rows.append(
            PackedRow(
                experience.group.prompt_token_ids,
                tuple(samples[place] for place in chosen),
                tuple(first + place for place in chosen),
                experience.group.prompt.sampling.temperature,
                shares_prompt,
            )
        )
        first += len(samples)
    return rows
