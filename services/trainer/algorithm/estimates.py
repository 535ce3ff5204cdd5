"""What is computed of a batch before its updates: logprobs of other policies, values and advantages."""

from collections.abc import Sequence

import torch

from penstock.services.trainer.algorithm.kinds import Kind
from penstock.services.trainer.algorithm.minibatches import StepBatch
from penstock.services.trainer.algorithm.reference import Reference
from penstock.services.trainer.batch import token_data
from penstock.services.trainer.batch.token_data import LossInputs
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.phases import Phases
from penstock.shared.settings.algorithm import AlgorithmSettings


class Estimates:
    """The models that look at a batch first, on the training thread."""

    def __init__(
        self,
        policy: TrainingEngine,
        critic: TrainingEngine | None,
        reference: Reference | None,
        algorithm: AlgorithmSettings,
        phases: Phases,
    ) -> None:
        self._policy = policy
        self._critic = critic
        self._reference = reference
        self._algorithm = algorithm
        self._phases = phases

    def fill(self, inputs: Sequence[LossInputs], batch: StepBatch, kind: Kind) -> None:
        """Set what the objective needs in ``inputs``, this rank's part of ``batch``; collective."""
        if self._algorithm.proximal == "recomputed":
            with self._phases.measure("proximal"):
                for micro_batch in inputs:
                    micro_batch.proximal_logprobs_N = self._policy.evaluate(micro_batch.batch).policy_logprobs_N
        if self._algorithm.reference_travels:
            token_data.add_reference(inputs, batch.groups)
        elif self._reference is not None:
            with self._phases.measure("reference"), torch.no_grad():
                for micro_batch in inputs:
                    micro_batch.reference_logprobs_N = self._reference(micro_batch.batch).policy_logprobs_N
        if self._algorithm.distillation:
            token_data.add_teacher(inputs, batch.groups, self._algorithm.distillation_top_k)
        if self._critic is not None:
            with self._phases.measure("critic"):
                for micro_batch in inputs:
                    micro_batch.values_N = self._critic.evaluate(micro_batch.batch)
        kind.assign(inputs, batch.rewards, batch.demonstrated)
