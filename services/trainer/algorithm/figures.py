"""Figures of a step besides its losses (``step_totals``) and tokens (``diagnostics``), and the digest of its settings."""

import hashlib
import json
from collections.abc import Sequence

import torch

from penstock.services.trainer.algorithm.diagnostics import explained_variance, moments
from penstock.services.trainer.algorithm.rules.distillation import teacher_kl
from penstock.services.trainer.algorithm.schedule import critic_learning_rate
from penstock.services.trainer.batch.token_data import LossInputs
from penstock.shared.settings import Settings
from penstock.shared.settings.algorithm import AlgorithmSettings, BatchSettings

_OF_UPDATES = {"adam_betas", "adam_eps", "weight_decay", "max_grad_norm", "packing", "kernels", "logits"}


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
    critic = critic_learning_rate(settings, step) if of.needs_critic else None
    tokens = settings.sampling.max_new_tokens if of.aggregation == "constant" else None
    text = json.dumps([algorithm, trainer, rate, critic, tokens, of.needs_reference], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
