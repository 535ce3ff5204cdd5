"""Forward and backward passes of a step's updates, and the sums of what they compute."""

import torch

from penstock.services.trainer.algorithm.diagnostics import StepSums
from penstock.services.trainer.algorithm.kinds import Kind, Objective
from penstock.services.trainer.algorithm.minibatches import Minibatch
from penstock.services.trainer.algorithm.step_totals import Tally
from penstock.services.trainer.batch.token_data import LossInputs
from penstock.services.trainer.model.critic import value_loss
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.forward_passes import ForwardPasses

_VALUE_CLIP = 0.2
"""Largest change of a value in one step (``value_loss``)."""


class Passes:
    """Of one step, on the training thread."""

    def __init__(
        self, policy: TrainingEngine, critic: TrainingEngine | None, kind: Kind, attempts: ForwardPasses
    ) -> None:
        self._policy = policy
        self._critic = critic
        self._kind = kind
        self.attempts = attempts
        self._sums, self.tally = StepSums(policy.device), Tally(policy.device)

    def backward(self, minibatch: Minibatch) -> None:
        """Add the policy's gradients of an update."""
        divisors = {stream: self._kind.divisor(stream, count) for stream, count in minibatch.counts.items()}
        for part, last in self.attempts.results(minibatch.inputs, minibatch.rows, self._objective):
            streams = {stream: whole / divisors[stream] for stream, whole in part.sums.items()}
            loss = torch.stack(list(streams.values())).sum()
            self._policy.backward(loss * self._policy.ranks, last=last)
            with torch.no_grad():
                self._sums.add(part.figures)
                self.tally.add(streams, part.margins_P)

    def _objective(self, inputs: LossInputs) -> Objective:
        return self._kind.objective(inputs, self._policy.forward(inputs.batch))

    def backward_critic(self, minibatch: Minibatch) -> None:
        """Add the critic's gradients of an update."""
        assert self._critic is not None
        for number, inputs in enumerate(minibatch.inputs, start=1):
            assert inputs.values_N is not None
            assert inputs.returns_N is not None
            values_N = self._critic.forward(inputs.batch)
            earlier_N, returns_N = inputs.chosen(inputs.values_N), inputs.chosen(inputs.returns_N)
            loss_N = value_loss(inputs.chosen(values_N), earlier_N, returns_N, _VALUE_CLIP)
            loss = loss_N.sum() / max(1, minibatch.counts["rl"].tokens)
            self._critic.backward(loss * self._critic.ranks, last=number == len(minibatch.inputs))
            self.tally.add_value_loss(loss)

    def over_ranks(self) -> dict[str, float]:
        """Return the step's figures; collective."""
        return {**self._sums.over_ranks(), **self.tally.over_ranks(), **self.attempts.over_ranks()}
