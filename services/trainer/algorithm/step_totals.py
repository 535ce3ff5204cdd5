"""Losses, gradient norms and other figures of a step's updates, and the digest of its settings."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.services.trainer.algorithm.diagnostics import explained_variance, moments
from penstock.services.trainer.algorithm.loss.aggregation import STREAMS, Stream
from penstock.services.trainer.algorithm.rules.distillation import teacher_kl
from penstock.services.trainer.algorithm.schedule import critic_learning_rate
from penstock.services.trainer.batch.token_data import LossInputs
from penstock.shared.settings import Settings
from penstock.shared.settings.algorithm import AlgorithmSettings, BatchSettings

_OF_UPDATES = {"adam_betas", "adam_eps", "weight_decay", "max_grad_norm", "packing", "kernels", "logits"}


class NotFinite(Exception):
    """A loss or gradient is not finite. ``touched``: some weights were already updated."""

    def __init__(self, message: str, *, touched: bool) -> None:
        super().__init__(message)
        self.touched = touched


class Tally:
    """Means over a step's updates, sums over ranks."""

    def __init__(self, device: torch.device) -> None:
        self._losses = torch.zeros(4, dtype=torch.float64, device=device)  # value, pairs, agreed, margin
        self._streams = torch.zeros(len(STREAMS), dtype=torch.float64, device=device)
        self._used: set[Stream] = set()
        self._norms: list[float] = []
        self._critic_norms: list[float] = []

    def add(self, streams: Mapping[Stream, Tensor], margins_P: Tensor | None) -> None:
        for stream, loss in streams.items():
            self._streams[STREAMS.index(stream)] += loss.detach().double()
        self._used |= streams.keys()
        if margins_P is not None:
            self._losses[1] += margins_P.numel()
            self._losses[2] += (margins_P > 0).sum()
            self._losses[3] += margins_P.double().sum()

    def add_value_loss(self, loss: Tensor) -> None:
        self._losses[0] += loss.detach().double()

    def updated(self, grad_norm: float, step: int) -> None:
        _check_norm("policy", grad_norm, step, touched=bool(self._norms))
        self._norms.append(grad_norm)

    def critic_updated(self, grad_norm: float, step: int) -> None:
        _check_norm("critic", grad_norm, step, touched=True)
        self._critic_norms.append(grad_norm)

    def over_ranks(self) -> dict[str, float]:
        """Return the step's figures; collective."""
        dist.all_reduce(self._losses)
        dist.all_reduce(self._streams)
        (value, pairs, agreed, margin), updates = self._losses.tolist(), len(self._norms)
        streams = dict(zip(STREAMS, (self._streams / updates).tolist(), strict=True))
        figures = {"loss": sum(streams.values()), "grad_norm": sum(self._norms) / updates, "updates": float(updates)}
        figures |= {f"{stream}_loss": streams[stream] for stream in STREAMS if stream in self._used}
        if self._critic_norms:
            figures |= {"value_loss": value / updates, "critic_grad_norm": sum(self._critic_norms) / updates}
        if pairs:
            figures |= {"preference_accuracy": agreed / pairs, "preference_margin": margin / pairs}
        return figures


def _check_norm(whose: str, grad_norm: float, step: int, *, touched: bool) -> None:
    if not math.isfinite(grad_norm):
        raise NotFinite(f"expected a finite gradient of the {whose} at step {step}, found {grad_norm}", touched=touched)


def check_finite(measured: Mapping[str, float], step: int) -> None:
    watched = {name: measured[name] for name in ("loss", "value_loss") if name in measured}
    if not all(math.isfinite(value) for value in watched.values()):
        raise NotFinite(f"expected a finite loss at step {step}, found {watched}", touched=True)


def look_back(inputs: Sequence[LossInputs], algorithm: AlgorithmSettings, *, has_samples: bool) -> dict[str, float]:
    """Return what teacher and critic say of the step's tokens; collective. ``has_samples``: a policy drew some."""
    figures = {"kl_coefficient": algorithm.kl.coefficient} if algorithm.needs_reference else {}
    if not has_samples:
        return figures
    if algorithm.distillation:
        figures["teacher_kl"], _ = moments(torch.cat([each.chosen(teacher_kl(each)) for each in inputs]))
    if algorithm.needs_critic:
        returns = [each.chosen(each.returns_N) for each in inputs if each.returns_N is not None]
        values = [each.chosen(each.values_N) for each in inputs if each.values_N is not None]
        figures["explained_variance"] = explained_variance(torch.cat(returns), torch.cat(values))
    return figures


def settings_digest(settings: Settings, rate: float, step: int) -> str:
    """Return a digest of the settings that determine step ``step``, with its learning rate instead of a schedule's.

    Those of batches, which a replay has, are not among them.
    """
    of = settings.algorithm
    algorithm = of.model_dump(mode="json", exclude=set(BatchSettings.model_fields))
    trainer = settings.trainer.model_dump(mode="json", include=_OF_UPDATES)
    if trainer["adam_eps"] == type(settings.trainer).model_fields["adam_eps"].default:
        del trainer["adam_eps"]  # as in the journals of versions without the setting
    if settings.trainer.zero_stage != type(settings.trainer).model_fields["zero_stage"].default:
        trainer["zero_stage"] = settings.trainer.zero_stage  # which adds gradients in another order, as other ranks do
    if settings.trainer.expert_parallel > 1:
        trainer["expert_parallel"] = settings.trainer.expert_parallel
    critic = critic_learning_rate(settings, step) if of.needs_critic else None
    tokens = settings.sampling.max_new_tokens if of.aggregation == "constant" else None
    text = json.dumps([algorithm, trainer, rate, critic, tokens, of.needs_reference], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
