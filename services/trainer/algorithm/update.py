"""One step's effect on the weights. Every rank calls it with the same batch.

A *step* is one batch, committed as one version: ``epochs × minibatches`` optimizer updates. It depends only on the
batch, lags, step number, weights and *plan*: the layout of forward passes, and which of these did not fit
(``model/forward_passes``); so a replay with the plan is bit-identical. Non-finite gradients reach no weight.
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from penstock.services.trainer.algorithm import functions
from penstock.services.trainer.algorithm.advantages import shaped_rewards
from penstock.services.trainer.algorithm.backward import Passes
from penstock.services.trainer.algorithm.estimates import Estimates, Reference
from penstock.services.trainer.algorithm.kinds import kind_of
from penstock.services.trainer.algorithm.minibatches import StepBatch, lay_out
from penstock.services.trainer.algorithm.schedule import critic_learning_rate, learning_rate
from penstock.services.trainer.algorithm.step_totals import check_finite, look_back, settings_digest
from penstock.services.trainer.batch.token_data import LossInputs
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.experts import take_imbalance
from penstock.services.trainer.model.forward_passes import ForwardPasses
from penstock.services.trainer.model.routing.exchange import RouteExchange
from penstock.services.trainer.phases import Phases, utilisation
from penstock.shared.bus.messages import Experience, Float32Array, Misfit, PolicyVersion, StepPlan
from penstock.shared.model.flops import BACKWARD
from penstock.shared.settings import Settings

_NO_LAGS: Mapping[PolicyVersion, int] = collections.Counter()
"""Where nothing is trained."""


class Learner:
    """This rank's policy, critic and reference; on the training thread."""

    def __init__(
        self,
        policy: TrainingEngine,
        settings: Settings,
        phases: Phases,
        critic: TrainingEngine | None = None,
        reference: Reference | None = None,
    ) -> None:
        functions.check(settings.algorithm)
        self._policy = policy
        self._critic = critic
        self._settings = settings
        self._phases = phases
        self._kind = kind_of(settings)
        self._estimates = Estimates(policy, critic, reference, settings.algorithm, phases)
        trunk: Any = policy.policy.trunk if settings.trainer.router_replay else None
        self._routes = None if trunk is None else RouteExchange(trunk.replay)
        self.plan: StepPlan | None = None
        self.logprobs: Mapping[int, Float32Array] = {}
        """Of the last step's last group, if the step :meth:`shows` it, by its samples' indexes: see ``Passes.logprobs``."""

    def learn(
        self,
        batch: Sequence[Experience],
        lags: Mapping[PolicyVersion, int],
        step: int,
        peak: float | None = None,
        repeated: StepPlan | None = None,
        contexts: Sequence[int] = (),
    ) -> dict[str, float]:
        """Make step ``step`` (from 1) from ``batch``, the same on every rank; return its figures over all ranks.

        Args:
            batch: the groups.
            lags: of the samples' versions, in steps.
            step: its number.
            peak: learning rate; default: the settings'.
            repeated: a replayed step's plan; :attr:`plan` differs if it does not fit any more.
            contexts: how many of each sample's oldest tokens only condition the others; empty: none.

        Raises:
            NotFinite: on every rank alike.
        """
        algorithm = self._settings.algorithm
        known = self._batch(batch, lags, repeated.contexts if repeated else contexts)
        minibatches, plan = lay_out(
            known, step, self._kind, self._settings, self._policy, algorithm.minibatches, repeated
        )
        inputs = [micro_batch for minibatch in minibatches for micro_batch in minibatch.inputs]
        routed, plan = self._routed(inputs, plan)
        self._estimates.fill(inputs, known, self._kind)

        rate = learning_rate(self._settings, step, peak)
        samples = [len(each.group.samples) for each in batch]
        last = range(sum(samples[:-1]), sum(samples))
        misfits = repeated.misfits if repeated and repeated.layout == plan.layout else ()
        passes = self._passes(step, misfits, last if self.shows(step) else ())
        spent_s = self._spent_s()
        for _ in range(algorithm.epochs):
            for minibatch in minibatches:
                with self._phases.measure("forward_backward"):
                    passes.backward(minibatch)
                with self._phases.measure("optimizer"):
                    passes.tally.updated(self._policy.step(rate), step)
                if self._critic is not None:
                    with self._phases.measure("critic"):
                        passes.backward_critic(minibatch)
                        passes.tally.critic_updated(self._critic.step(critic_learning_rate(self._settings, step)), step)

        measured = {**passes.over_ranks(), **take_imbalance(self._policy.policy), **routed, "learning_rate": rate}
        check_finite(measured, step)
        digest = settings_digest(self._settings, rate, step)
        self.plan = dataclasses.replace(plan, misfits=tuple(passes.attempts.misfits), settings=digest)
        self.logprobs = {place - last.start: logprobs for place, logprobs in passes.logprobs.items()}
        flops = sum(micro_batch.batch.flops for micro_batch in inputs) * (1 + BACKWARD) * algorithm.epochs
        peak_tflops, device = self._settings.internal.peak_tflops, self._policy.device
        measured |= utilisation(flops, self._spent_s() - spent_s, peak_tflops, device)
        return measured | look_back(inputs, algorithm, has_samples="reference_kl" in measured)

    def _routed(self, inputs: Sequence[LossInputs], plan: StepPlan) -> tuple[dict[str, float], StepPlan]:
        """Take the routes of the step's passes; return figures, and the plan with what has routes. Collective."""
        if self._routes is None:
            return {}, plan
        with self._phases.measure("routes"):
            drawn = [sample for each in inputs for sample in each.routed]
            figures, of_routes = self._routes.exchange([each.batch for each in inputs], drawn)
        return figures, dataclasses.replace(plan, layout=f"{plan.layout}{of_routes}")

    def offer(self, routes: Mapping[bytes, bytes]) -> None:
        """Give rank 0 the routes of the next step's samples, by claim."""
        if self._routes is not None:
            self._routes.offered = routes

    def figures_of(self, held_out: Sequence[Experience]) -> dict[str, float]:
        """Return the figures of held-out demonstrations or pairs (``kinds``); collective."""
        batch = self._batch(held_out, _NO_LAGS)
        (minibatch,), _ = lay_out(batch, 0, self._kind, self._settings, self._policy)
        sums = torch.zeros(2, dtype=torch.float64, device=self._policy.device)
        with torch.no_grad():
            if self._settings.algorithm.needs_reference:
                self._estimates.fill(minibatch.inputs, batch, self._kind)
            with self._phases.measure("evaluation"):
                for inputs in minibatch.inputs:
                    sums += self._kind.held_out_sums(inputs, self._policy.evaluate(inputs.batch))
        dist.all_reduce(sums)
        loss, ordered = sums.tolist()
        return self._kind.held_out_figures(loss, ordered, minibatch.counts)

    def try_out(self, batch: Sequence[Experience], contexts: Sequence[int] = ()) -> None:
        """Run training on ``batch``, with backward passes, without changes; collective. ``contexts`` as in ``learn``."""
        known, device = self._batch(batch, _NO_LAGS, contexts), self._policy.device
        (minibatch,), _ = lay_out(known, 0, self._kind, self._settings, self._policy)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            self._estimates.fill(minibatch.inputs, known, self._kind)
            passes = self._passes(0)
            with self._policy.gradients_discarded():
                passes.backward(minibatch)
            if self._critic is not None:
                with self._critic.gradients_discarded():
                    passes.backward_critic(minibatch)

    def _batch(
        self, groups: Sequence[Experience], lags: Mapping[PolicyVersion, int], contexts: Sequence[int] = ()
    ) -> StepBatch:
        return StepBatch(groups, [shaped_rewards(each, self._settings.algorithm) for each in groups], lags, contexts)

    def _passes(self, step: int, misfits: Sequence[Misfit] = (), shown: Collection[int] = ()) -> Passes:
        seed = (self._settings.run.seed, step)
        attempts = ForwardPasses(self._policy, seed, self._kind.together, misfits)
        return Passes(self._policy, self._critic, self._kind, attempts, shown)

    def shows(self, step: int) -> bool:
        """Whether the tokens of the step's last group are recorded."""
        return step % self._settings.coordinator.sample_every_steps == 0

    def _spent_s(self) -> float:
        return self._phases.seconds["forward_backward"] + self._phases.seconds["optimizer"]
