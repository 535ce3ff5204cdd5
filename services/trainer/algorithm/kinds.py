"""What a step's batches are made of, and what is learned from them; chosen once, by the loss (``rules``).

::

    Samples           groups that a policy drew, and demonstrations beside them (a mixture)      rules/clip, gspo, cispo, …
    Demonstrations    rows with a completion: supervised fine-tuning                             rules/cross_entropy
    Pairs             the best and the worst of a group, or the two of a row                     rules/dpo
"""

import dataclasses
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from penstock.services.trainer.algorithm.diagnostics import TokenFigures
from penstock.services.trainer.algorithm.loss import corrections
from penstock.services.trainer.algorithm.loss.aggregation import Count, Stream, divisor, of_stream, total
from penstock.services.trainer.algorithm.loss.kl import estimate
from penstock.services.trainer.algorithm.rules.distillation import kl_over_top_k
from penstock.services.trainer.algorithm.token_advantages import assign
from penstock.services.trainer.batch.token_data import LossInputs
from penstock.services.trainer.model.layers.logits import TokenLogprobs
from penstock.shared.bus.messages import Experience, Float32Array
from penstock.shared.settings import Settings
from penstock.shared.settings.algorithm import AlgorithmSettings


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """The trained tokens (N) of a forward pass; the ratio ``ρ = exp(policy − anchor)`` starts from the anchor."""

    inputs: LossInputs
    out: TokenLogprobs
    policy_N: Tensor
    anchor_N: Tensor
    advantages_N: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token, and whether a bound removed its gradient (for CISPO: limited its weight)."""

    loss_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Objective:
    """Of a forward pass, by stream (``aggregation``)."""

    sums: Mapping[Stream, Tensor]
    """Undivided."""
    figures: TokenFigures
    margins_P: Tensor | None = None


class Kind:
    """Batches of one kind."""

    together = 1
    """Neighbouring samples that stay in one forward pass."""
    shows_demonstrations = True
    """Whether samples of demonstrations count for ``ce``, and not for ``rl``."""

    def __init__(self, settings: Settings) -> None:
        self._algorithm = settings.algorithm
        self._longest = settings.sampling.max_new_tokens

    def trained(self, rewards_S: Float32Array) -> Sequence[int]:
        return range(len(rewards_S))

    def assign(
        self,
        inputs: Sequence[LossInputs],
        groups: Sequence[Experience],
        rewards: Sequence[Float32Array],
        demonstrated: Collection[int],
    ) -> None:
        """Set what the objective needs of a batch's rewards; collective. ``demonstrated`` groups have none."""

    def objective(self, inputs: LossInputs, out: TokenLogprobs) -> Objective:
        raise NotImplementedError

    def divisor(self, stream: Stream, count: Count) -> float:
        return divisor(of_stream(stream, self._algorithm.aggregation), count, self._longest)

    def held_out_sums(self, inputs: LossInputs, out: TokenLogprobs) -> Tensor:
        """Return the undivided loss of a forward pass of held-out data, and how many are ordered right (2)."""
        raise NotImplementedError

    def held_out_figures(self, loss: float, ordered: float, counts: Mapping[Stream, Count]) -> dict[str, float]:
        """Return the figures of the sums over all forward passes."""
        raise NotImplementedError


class Samples(Kind):
    """Groups that a policy drew: loss × correction, entropy, KL, teacher. Demonstrations are taken out first."""

    def __init__(self, settings: Settings, loss: Callable[[Tokens, AlgorithmSettings], TokenLoss]) -> None:
        super().__init__(settings)
        self._loss = loss

    def assign(
        self,
        inputs: Sequence[LossInputs],
        groups: Sequence[Experience],
        rewards: Sequence[Float32Array],
        demonstrated: Collection[int],
    ) -> None:
        assign(inputs, rewards, self._algorithm, demonstrated, groups)

    def objective(self, inputs: LossInputs, out: TokenLogprobs) -> Objective:
        if inputs.demonstrated_S is None:
            return self._of_samples(inputs, out)
        of_samples = self._of_samples(inputs.without_demonstrations(), _drawn(inputs, out))
        shown = self._algorithm.imitation * imitated(inputs, out, self._algorithm)
        return Objective({**of_samples.sums, "ce": shown}, of_samples.figures)

    def _of_samples(self, inputs: LossInputs, out: TokenLogprobs) -> Objective:
        assert inputs.advantages_N is not None
        algorithm, policy_N = self._algorithm, out.policy_logprobs_N
        anchor_N = self._anchor(inputs, policy_N)
        loss = self._loss(Tokens(inputs, out, policy_N, anchor_N, inputs.advantages_N), algorithm)
        loss_N, masked_N, losses_N = loss.loss_N, torch.zeros_like(loss.clipped_low_N), dict[Stream, Tensor]()
        if algorithm.correction != "none" and algorithm.correction != "ignored" and algorithm.correction != "ratio":
            weights_N = corrections.weights(
                anchor_N, inputs.behavior_logprobs_N, inputs.lengths_S,
                algorithm.correction, *algorithm.correction_band,
            )  # fmt: skip
            loss_N, masked_N = loss_N * weights_N, weights_N == 0.0
        if algorithm.kl.in_loss:
            assert inputs.reference_logprobs_N is not None
            kl_N = estimate(policy_N, inputs.reference_logprobs_N, algorithm.kl.estimator)
            losses_N["reference_kl"] = algorithm.kl.coefficient * kl_N
        if algorithm.distillation_top_k:
            losses_N["distillation"] = algorithm.distillation * kl_over_top_k(inputs, out)
        if algorithm.entropy_bonus:
            losses_N["entropy"] = -algorithm.entropy_bonus * out.entropy_N
        losses_N["rl"] = loss_N
        taken = (loss.clipped_low_N, loss.clipped_high_N, masked_N)
        how = {name: of_stream(name, algorithm.aggregation) for name in losses_N}
        sums = {name: total(losses_N[name], inputs.lengths_S, how[name]) for name in losses_N}
        return Objective(sums, _figures(inputs, out, algorithm, taken))

    def _anchor(self, inputs: LossInputs, policy_logprobs_N: Tensor) -> Tensor:
        """Return the ratio's anchor; for a policy gradient the policy itself."""
        if self._algorithm.loss == "policy_gradient":
            return policy_logprobs_N.detach()
        if self._algorithm.proximal == "log_linear":
            return corrections.log_linear(inputs.behavior_logprobs_N, policy_logprobs_N, inputs.lags_N)
        if self._algorithm.proximal == "recomputed":
            assert inputs.proximal_logprobs_N is not None
            return inputs.proximal_logprobs_N
        return inputs.behavior_logprobs_N


def kind_of(settings: Settings) -> Kind:
    """Return the kind of the run's batches, from the file of its loss."""
    name = "own" if ":" in settings.algorithm.loss else settings.algorithm.loss
    rule = importlib.import_module(f"penstock.services.trainer.algorithm.rules.{name}")
    kind: Kind = rule.Batches(settings) if hasattr(rule, "Batches") else Samples(settings, rule.loss)
    return kind


def imitated(inputs: LossInputs, out: TokenLogprobs, algorithm: AlgorithmSettings) -> Tensor:
    """Return the undivided cross-entropy of the demonstrations."""
    logprobs_N = inputs.chosen(out.policy_logprobs_N, demonstrated=True)
    return total(-logprobs_N, inputs.lengths(demonstrated=True), of_stream("ce", algorithm.aggregation))


def _drawn(inputs: LossInputs, out: TokenLogprobs) -> TokenLogprobs:
    """Return the logprobs of the tokens that a policy drew."""
    top_NK, others_N = out.top_logprobs_NK, out.others_logprobs_N
    return TokenLogprobs(
        inputs.chosen(out.policy_logprobs_N),
        inputs.chosen(out.entropy_N),
        None if top_NK is None else inputs.chosen(top_NK),
        None if others_N is None else inputs.chosen(others_N),
    )


def unclipped(inputs: LossInputs, out: TokenLogprobs, algorithm: AlgorithmSettings) -> TokenFigures:
    """Return the figures of a loss without a ratio; those of demonstrations as if the policy had drawn them itself, and
    without a KL to the reference, whose estimate is over a policy's own tokens.
    """
    never_N = torch.zeros_like(out.policy_logprobs_N, dtype=torch.bool)
    figures = _figures(inputs, out, algorithm, (never_N, never_N, never_N))
    if inputs.demonstrated_S is None:
        return figures
    drawn_N = figures.policy_logprobs_N
    return dataclasses.replace(figures, behavior_logprobs_N=drawn_N, reference_kl_N=torch.zeros_like(drawn_N))


def _figures(
    inputs: LossInputs, out: TokenLogprobs, algorithm: AlgorithmSettings, taken: tuple[Tensor, Tensor, Tensor]
) -> TokenFigures:
    policy_N, entropy_N = out.policy_logprobs_N.detach(), out.entropy_N.detach()
    behavior_N, kl_N = inputs.behavior_logprobs_N, torch.zeros_like(policy_N)
    if inputs.reference_logprobs_N is not None:
        kl_N = estimate(policy_N, inputs.reference_logprobs_N, algorithm.kl.estimator)
    return TokenFigures(policy_N, behavior_N, entropy_N, *taken, reference_kl_N=kl_N)
