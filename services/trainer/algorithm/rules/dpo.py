"""DPO: a group's best and worst sample form a preference; with preference pairs a group is one pair.

Rafailov et al. 2023, DPO, arXiv:2305.18290, eq. 7; online, on the policy's own samples: Guo et al. 2024, arXiv:2402.04792::

    margin = (log π(best) − log ref(best)) − (log π(worst) − log ref(worst))        logprobs of whole samples
    loss   = −log σ(β · margin)
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.services.trainer.algorithm.kinds import Kind, Objective, unclipped
from penstock.services.trainer.algorithm.loss.aggregation import Count, Stream, sequence_sums
from penstock.services.trainer.batch.token_data import LossInputs
from penstock.services.trainer.model.layers.logits import TokenLogprobs
from penstock.shared.bus.messages import Float32Array


class Batches(Kind):
    """Preferences; the samples of pairs that no policy drew count as those of others."""

    together = 2
    shows_demonstrations = False

    def trained(self, rewards_S: Float32Array) -> Sequence[int]:
        return best_and_worst(rewards_S) or ()

    def objective(self, inputs: LossInputs, out: TokenLogprobs) -> Objective:
        assert inputs.reference_logprobs_N is not None
        loss = dpo(
            sequence_sums(out.policy_logprobs_N, inputs.lengths_S),
            sequence_sums(inputs.reference_logprobs_N, inputs.lengths_S),
            self._algorithm.dpo_beta,
        )
        sums: dict[Stream, Tensor] = {"rl": loss.loss_P.sum()}
        if self._algorithm.entropy_bonus:
            sums["entropy"] = -self._algorithm.entropy_bonus * out.entropy_N.sum()
        return Objective(sums, unclipped(inputs, out, self._algorithm), loss.margins_P)

    def divisor(self, stream: Stream, count: Count) -> float:
        return max(1.0, count.samples / 2) if stream == "rl" else super().divisor(stream, count)

    def held_out_sums(self, inputs: LossInputs, out: TokenLogprobs) -> Tensor:
        part = self.objective(inputs, out)
        assert part.margins_P is not None
        return torch.stack([part.sums["rl"].double(), (part.margins_P > 0).sum().double()])

    def held_out_figures(self, loss: float, ordered: float, counts: Mapping[Stream, Count]) -> dict[str, float]:
        """Return the mean loss, and the share of pairs whose margin is positive."""
        pairs = counts["rl"].samples / 2
        return {"evaluation_loss": loss / pairs, "evaluation_accuracy": ordered / pairs}


@dataclasses.dataclass(frozen=True, slots=True)
class PreferenceLoss:
    loss_P: Tensor
    margins_P: Tensor


def best_and_worst(rewards_S: Float32Array) -> tuple[int, int] | None:
    """Return the indices of a group's pair (the first of equals), or None if all rewards are equal."""
    best, worst = int(rewards_S.argmax()), int(rewards_S.argmin())
    return None if rewards_S[best] == rewards_S[worst] else (best, worst)


def dpo(policy_S: Tensor, reference_S: Tensor, beta: float) -> PreferenceLoss:
    """Return the loss of pairs, from logprobs of whole samples (nats) that alternate best, worst."""
    gain_S = policy_S - reference_S
    margins_P = beta * (gain_S[0::2] - gain_S[1::2])
    return PreferenceLoss(-logsigmoid(margins_P), margins_P.detach())
