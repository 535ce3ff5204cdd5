"""Supervised fine-tuning: −log π of the demonstrations' tokens."""

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.services.trainer.algorithm.kinds import Kind, Objective, imitated, unclipped
from penstock.services.trainer.algorithm.loss.aggregation import Count, Stream
from penstock.services.trainer.batch.token_data import LossInputs
from penstock.services.trainer.model.layers.logits import TokenLogprobs


class Batches(Kind):
    """Rows with a completion."""

    def objective(self, inputs: LossInputs, out: TokenLogprobs) -> Objective:
        return Objective({"ce": imitated(inputs, out, self._algorithm)}, unclipped(inputs, out, self._algorithm))

    def held_out_sums(self, inputs: LossInputs, out: TokenLogprobs) -> Tensor:
        return torch.stack([-out.policy_logprobs_N.double().sum(), out.policy_logprobs_N.new_zeros(()).double()])

    def held_out_figures(self, loss: float, ordered: float, counts: Mapping[Stream, Count]) -> dict[str, float]:
        """Return the mean cross-entropy of the tokens, in nats."""
        return {"evaluation_loss": loss / counts["ce"].tokens}
