"""Forward and backward passes of a step's updates, and the sums of what they compute."""

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from penstock.services.trainer.algorithm.diagnostics import StepSums
from penstock.services.trainer.algorithm.kinds import Kind, Objective
from penstock.services.trainer.algorithm.minibatches import Minibatch
from penstock.services.trainer.algorithm.step_totals import Tally
from penstock.services.trainer.batch.token_data import LossInputs
from penstock.services.trainer.model.critic import value_loss
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.forward_passes import ForwardPasses
from penstock.shared.bus.messages import Float32Array

_VALUE_CLIP = 0.2
"""Largest change of a value in one step (``value_loss``)."""


class Passes:
    """Of one step, on the training thread. ``shown``: places of the samples whose :attr:`logprobs` are kept."""

    def __init__(
        self,
        policy: TrainingEngine,
        critic: TrainingEngine | None,
        kind: Kind,
        attempts: ForwardPasses,
        shown: Collection[int] = (),
    ) -> None:
        self._policy = policy
        self._critic = critic
        self._kind = kind
        self.attempts = attempts
        self._sums, self.tally = StepSums(policy.device), Tally(policy.device)
        self._shown = shown
        self.logprobs: dict[int, Float32Array] = {}
        """The policy's, of the tokens (T) of samples by place, in their first pass; NaN: not trained. This rank's."""

    def backward(self, minibatch: Minibatch) -> None:
        """Add the policy's gradients of an update."""
        divisors = {stream: self._kind.divisor(stream, count) for stream, count in minibatch.counts.items()}
        logprobs = []
        for part, last in self.attempts.results(minibatch.inputs, minibatch.rows, self._objective):
            streams = {stream: whole / divisors[stream] for stream, whole in part.sums.items()}
            loss = torch.stack(list(streams.values())).sum()
            self._policy.backward(loss * self._policy.ranks, last=last)
            with torch.no_grad():
                self._sums.add(part.figures)
                self.tally.add(streams, part.margins_P)
            logprobs.append(part.figures.policy_logprobs_N)
        for inputs, logprobs_N in zip(minibatch.inputs, logprobs, strict=True):
            self._keep(inputs, logprobs_N)

    def _keep(self, inputs: LossInputs, logprobs_N: Tensor) -> None:
        """Keep the logprobs of a pass; those of demonstrations are missing beside samples (``kinds.Samples``)."""
        batch, known_S = inputs.batch, np.ones(len(inputs.batch.places_S), np.bool_)
        if inputs.demonstrated_S is not None and len(logprobs_N) < batch.lengths_S.sum():
            known_S = ~inputs.demonstrated_S
        ends_S = np.cumsum(np.where(known_S, batch.lengths_S, 0)).tolist()
        for index, place in enumerate(batch.places_S.tolist()):
            if place in self._shown and place not in self.logprobs and known_S[index]:
                trained = batch.trained_S[index]
                logprobs = np.full(len(trained), np.nan, np.float32)
                first = ends_S[index] - int(batch.lengths_S[index])
                logprobs[trained] = logprobs_N[first : ends_S[index]].float().cpu().numpy()
                self.logprobs[place] = logprobs

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
