"""One step's effect on the weights. Every rank calls it with the same batch.

A *step* is one batch, committed as one version: ``epochs × minibatches`` optimizer updates. It depends only on the
batch, lags, step number, weights and *plan*: the layout of forward passes, and which of these did not fit
(``model/forward_passes``); so a replay with the plan is bit-identical. Non-finite gradients reach no weight.
"""

import collections
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from services.trainer.algorithm import functions
from services.trainer.algorithm.advantages import shaped_rewards
from services.trainer.algorithm.diagnostics import StepSums, explained_variance, moments
from services.trainer.algorithm.loss.aggregation import Count, Stream, divisor, of_stream
from services.trainer.algorithm.loss.kl import next_coefficient
from services.trainer.algorithm.loss.objective import Objective, objective
from services.trainer.algorithm.minibatches import Minibatch, lay_out
from services.trainer.algorithm.reference import Reference
from services.trainer.algorithm.schedule import critic_learning_rate, learning_rate
from services.trainer.algorithm.step_totals import Tally, check_finite
from services.trainer.algorithm.token_advantages import assign, teacher_kl
from services.trainer.batch import token_data
from services.trainer.batch.token_data import LossInputs
from services.trainer.model.critic import value_loss
from services.trainer.model.engine import TrainingEngine
from services.trainer.model.forward_passes import ForwardPasses
from services.trainer.phases import Phases, utilisation
from shared.bus.messages import Experience, Float32Array, Misfit, PolicyVersion, Purpose, StepPlan
from shared.model.flops import BACKWARD
from shared.settings import Settings

_NO_LAGS: Mapping[PolicyVersion, int] = collections.defaultdict(int)
"""Where nothing is trained."""
_OF_BATCHES = {"preset", "groups_per_step", "max_lag", "on_stale", "wait_s", "dynamic_sampling", "filter"}
"""Settings of the algorithm that determine batches, which a replay has, and not their updates."""
_OF_UPDATES = {"adam_betas", "adam_eps", "weight_decay", "max_grad_norm", "packing", "kernels", "logits"}


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
        self._reference = reference
        self._settings = settings
        self._algorithm = settings.algorithm
        self._phases = phases
        self.kl_coefficient = settings.algorithm.kl.coefficient
        """Per nat, for the next step; checkpointed."""
        self.plan: StepPlan | None = None

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
        count = self._algorithm.minibatches
        rewards = self._rewards(batch)
        minibatches, plan = lay_out(batch, rewards, lags, step, self._settings, self._policy, count, repeated, contexts)
        inputs = [micro_batch for minibatch in minibatches for micro_batch in minibatch.inputs]
        self._evaluate(inputs, batch)
        assign(inputs, rewards, self._algorithm, self.kl_coefficient, _demonstrated(batch), batch)

        rate = self._rate(step, self._settings.trainer.learning_rate if peak is None else peak)
        misfits = repeated.misfits if repeated is not None and repeated.layout == plan.layout else ()
        update = _Update(self._passes(step, misfits), StepSums(self._policy.device), Tally(self._policy.device))
        spent_s = self._spent_s()
        for _ in range(self._algorithm.epochs):
            for minibatch in minibatches:
                with self._phases.measure("forward_backward"):
                    self._backward(minibatch, update)
                with self._phases.measure("optimizer"):
                    update.tally.updated(self._policy.step(rate), step)
                if self._critic is not None:
                    with self._phases.measure("critic"):
                        self._backward_critic(self._critic, minibatch, update.tally)
                        norm = self._critic.step(critic_learning_rate(self._settings, step))
                        update.tally.critic_updated(norm, step)

        measured = {**update.over_ranks(), "learning_rate": rate}
        check_finite(measured, step)
        settings = self._settings_digest(rate, step)
        self.plan = dataclasses.replace(plan, misfits=tuple(update.passes.misfits), settings=settings)
        measured |= self._utilisation(inputs, self._spent_s() - spent_s)
        drawn = sum(len(r) for place, r in enumerate(rewards) if place not in _demonstrated(batch))
        return measured | self._look_back(inputs, measured.get("reference_kl"), drawn)

    def _backward(self, minibatch: Minibatch, update: "_Update") -> None:
        divisors = {stream: self._divisor(stream, count) for stream, count in minibatch.counts.items()}
        for part, last in update.passes.results(minibatch.inputs, minibatch.rows, self._objective):
            streams = {stream: whole / divisors[stream] for stream, whole in part.sums.items()}
            loss = torch.stack(list(streams.values())).sum()
            self._policy.backward(loss * self._policy.ranks, last=last)
            with torch.no_grad():
                update.sums.add(part.figures)
                update.tally.add(streams, part.margins_P)

    def _objective(self, inputs: LossInputs) -> Objective:
        return objective(inputs, self._policy.forward(inputs.batch), self._algorithm, self.kl_coefficient)

    def _backward_critic(self, critic: TrainingEngine, minibatch: Minibatch, tally: Tally) -> None:
        for number, inputs in enumerate(minibatch.inputs, start=1):
            assert inputs.values_N is not None
            assert inputs.returns_N is not None
            values_N = critic.forward(inputs.batch)
            earlier_N, returns_N = inputs.chosen(inputs.values_N), inputs.chosen(inputs.returns_N)
            loss_N = value_loss(inputs.chosen(values_N), earlier_N, returns_N, self._algorithm.critic.clip)
            loss = loss_N.sum() / max(1, minibatch.counts["rl"].tokens)
            critic.backward(loss * critic.ranks, last=number == len(minibatch.inputs))
            tally.add_value_loss(loss)

    def _rewards(self, batch: Sequence[Experience]) -> list[Float32Array]:
        return [shaped_rewards(e, self._algorithm) for e in batch]

    def _evaluate(self, inputs: Sequence[LossInputs], batch: Sequence[Experience]) -> None:
        if self._algorithm.proximal == "recomputed":
            with self._phases.measure("proximal"):
                for micro_batch in inputs:
                    micro_batch.proximal_logprobs_N = self._policy.evaluate(micro_batch.batch).policy_logprobs_N
        if self._algorithm.reference_travels:
            token_data.add_reference(inputs, batch)
        elif self._reference is not None:
            with self._phases.measure("reference"), torch.no_grad():
                for micro_batch in inputs:
                    micro_batch.reference_logprobs_N = self._reference(micro_batch.batch).policy_logprobs_N
        if self._algorithm.distillation:
            token_data.add_teacher(inputs, batch, self._algorithm.distillation_top_k)
        if self._critic is not None:
            with self._phases.measure("critic"):
                for micro_batch in inputs:
                    micro_batch.values_N = self._critic.evaluate(micro_batch.batch)

    def _passes(self, step: int, misfits: Sequence[Misfit] = ()) -> ForwardPasses:
        together = 2 if self._algorithm.loss == "dpo" else 1
        return ForwardPasses(self._policy, (self._settings.run.seed, step), together, misfits)

    def _divisor(self, stream: Stream, count: Count) -> float:
        if self._algorithm.loss == "dpo" and stream == "rl":
            return max(1.0, count.samples / 2)
        how = of_stream(stream, self._algorithm.aggregation)
        return divisor(how, count, self._settings.sampling.max_new_tokens)

    def _rate(self, step: int, peak: float) -> float:
        if self._critic is not None and step <= self._algorithm.critic.warmup_steps:
            return 0.0
        settings = self._settings.trainer.model_copy(update={"learning_rate": peak})
        return learning_rate(settings, step, self._settings.run.steps)

    def _settings_digest(self, rate: float, step: int) -> str:
        """Return a digest of the settings that determine step ``step``, with its learning rate instead of a schedule's."""
        algorithm = self._algorithm.model_dump(mode="json", exclude=_OF_BATCHES)
        algorithm["kl"]["coefficient"] = self.kl_coefficient
        trainer = self._settings.trainer.model_dump(mode="json", include=_OF_UPDATES)
        if trainer["adam_eps"] == type(self._settings.trainer).model_fields["adam_eps"].default:
            del trainer["adam_eps"]  # as in the journals of versions without the setting
        critic = critic_learning_rate(self._settings, step) if self._critic is not None else None
        tokens = self._settings.sampling.max_new_tokens if self._algorithm.aggregation == "constant" else None
        text = json.dumps([algorithm, trainer, rate, critic, tokens, self._algorithm.needs_reference], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _spent_s(self) -> float:
        return self._phases.seconds["forward_backward"] + self._phases.seconds["optimizer"]

    def _utilisation(self, inputs: Sequence[LossInputs], seconds: float) -> dict[str, float]:
        flops = sum(micro_batch.batch.flops for micro_batch in inputs) * (1 + BACKWARD) * self._algorithm.epochs
        return utilisation(flops, seconds, self._settings.internal.peak_tflops, self._policy.device)

    def _look_back(self, inputs: Sequence[LossInputs], reference_kl: float | None, samples: int) -> dict[str, float]:
        figures: dict[str, float] = {}
        if self._algorithm.needs_reference:
            figures["kl_coefficient"] = self.kl_coefficient
        if reference_kl is None:  # of demonstrations alone
            return figures
        if self._algorithm.distillation:
            drawn = [micro_batch.chosen(teacher_kl(micro_batch)) for micro_batch in inputs]
            figures["teacher_kl"], _ = moments(torch.cat(drawn))
        if self._critic is not None:
            returns = [each.chosen(each.returns_N) for each in inputs if each.returns_N is not None]
            values = [each.chosen(each.values_N) for each in inputs if each.values_N is not None]
            figures["explained_variance"] = explained_variance(torch.cat(returns), torch.cat(values))
        kl = self._algorithm.kl
        if kl.target:
            self.kl_coefficient = next_coefficient(self.kl_coefficient, reference_kl, kl.target, samples)
        return figures

    def figures_of(self, held_out: Sequence[Experience]) -> dict[str, float]:
        """Return the mean cross-entropy of demonstrations' tokens, nats, or of pairs the mean loss and the share whose
        margin is positive; collective.
        """
        rewards, pairs = self._rewards(held_out), self._algorithm.loss == "dpo"
        (minibatch,), _ = lay_out(held_out, rewards, _NO_LAGS, 0, self._settings, self._policy)
        sums = torch.zeros(2, dtype=torch.float64, device=self._policy.device)
        with torch.no_grad():
            if pairs:
                self._evaluate(minibatch.inputs, held_out)
            with self._phases.measure("evaluation"):
                for inputs in minibatch.inputs:
                    sums += self._held_out_sums(inputs, pairs=pairs)
        dist.all_reduce(sums)
        loss, ordered = sums.tolist()
        if not pairs:
            return {"evaluation_loss": loss / minibatch.counts["ce"].tokens}
        return {"evaluation_loss": loss / len(held_out), "evaluation_accuracy": ordered / len(held_out)}

    def _held_out_sums(self, inputs: LossInputs, *, pairs: bool) -> torch.Tensor:
        """Return the undivided loss of a forward pass, and how many pairs the policy orders as they are."""
        out = self._policy.evaluate(inputs.batch)
        if not pairs:
            return torch.stack([-out.policy_logprobs_N.double().sum(), out.policy_logprobs_N.new_zeros(()).double()])
        part = objective(inputs, out, self._algorithm, self.kl_coefficient)
        assert part.margins_P is not None
        return torch.stack([part.sums["rl"].double(), (part.margins_P > 0).sum().double()])

    def try_out(self, batch: Sequence[Experience], contexts: Sequence[int] = ()) -> None:
        """Run training on ``batch``, with backward passes, without changes; collective. ``contexts`` as in ``learn``."""
        rewards, device = self._rewards(batch), self._policy.device
        (minibatch,), _ = lay_out(batch, rewards, _NO_LAGS, 0, self._settings, self._policy, contexts=contexts)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            self._evaluate(minibatch.inputs, batch)
            assign(minibatch.inputs, rewards, self._algorithm, self.kl_coefficient, _demonstrated(batch), batch)
            update = _Update(self._passes(0), StepSums(device), Tally(device))
            with self._policy.gradients_discarded():
                self._backward(minibatch, update)
            if self._critic is not None:
                with self._critic.gradients_discarded():
                    self._backward_critic(self._critic, minibatch, update.tally)


def _demonstrated(batch: Sequence[Experience]) -> frozenset[int]:
    purposes = (experience.group.prompt.purpose for experience in batch)
    return frozenset(place for place, purpose in enumerate(purposes) if purpose is Purpose.DEMONSTRATE)


@dataclasses.dataclass(frozen=True, slots=True)
class _Update:
    passes: ForwardPasses
    sums: StepSums
    tally: Tally

    def over_ranks(self) -> dict[str, float]:
        return {**self.sums.over_ranks(), **self.tally.over_ranks(), **self.passes.over_ranks()}
