"""What is computed of a batch before its updates: logprobs of other policies, values and advantages."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.services.trainer.algorithm.kinds import Kind
from penstock.services.trainer.algorithm.minibatches import StepBatch
from penstock.services.trainer.batch import token_data
from penstock.services.trainer.batch.packing import MicroBatch
from penstock.services.trainer.batch.token_data import LossInputs
from penstock.services.trainer.model import adapter
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.layers.logits import TokenLogprobs
from penstock.services.trainer.phases import Phases
from penstock.shared.settings.algorithm import AlgorithmSettings

Reference = Callable[[MicroBatch], TokenLogprobs]
"""Returns the initial policy's logprobs of a micro-batch; collective."""


class AdapterOff:
    """Reference of a policy with adapters: the same weights without them, whose routers choose, as in other references."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine

    def __call__(self, batch: MicroBatch) -> TokenLogprobs:
        policy: Any = self._engine.policy
        with adapter.off(policy), policy.trunk.routing_live():
            logprobs: TokenLogprobs = self._engine.evaluate(batch)
            return logprobs


@dataclasses.dataclass(slots=True)
class Estimates:
    """The models that look at a batch first, on the training thread."""

    policy: TrainingEngine
    critic: TrainingEngine | None
    reference: Reference | None
    algorithm: AlgorithmSettings
    phases: Phases

    def fill(self, inputs: Sequence[LossInputs], batch: StepBatch, kind: Kind) -> None:
        """Set what the objective needs in ``inputs``, this rank's part of ``batch``; collective."""
        if self.algorithm.proximal == "recomputed":
            with self.phases.measure("proximal"):
                for micro_batch in inputs:
                    micro_batch.proximal_logprobs_N = self.policy.evaluate(micro_batch.batch).policy_logprobs_N
        if self.algorithm.reference_travels:
            token_data.add_reference(inputs, batch.groups)
        elif self.reference is not None:
            with self.phases.measure("reference"), torch.no_grad():
                for micro_batch in inputs:
                    micro_batch.reference_logprobs_N = self.reference(micro_batch.batch).policy_logprobs_N
        if self.algorithm.distillation:
            token_data.add_teacher(inputs, batch.groups, self.algorithm.distillation_top_k)
        if self.critic is not None:
            with self.phases.measure("critic"):
                for micro_batch in inputs:
                    micro_batch.values_N = self.critic.evaluate(micro_batch.batch)
        kind.assign(inputs, batch.groups, batch.rewards, batch.demonstrated)
