"""Logprobs and gradients that the self-test compares, and their distance.

Shapes: ``N`` tokens (of a critic: numbers of hidden states), ``K`` distinct tokens, ``D`` hidden size.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.services.trainer.batch.packing import PackedRow
from penstock.services.trainer.model import experts
from penstock.services.trainer.model.critic import Critic
from penstock.services.trainer.model.layers import ulysses
from penstock.services.trainer.model.memory import layerwise
from penstock.services.trainer.model.policy import Policy


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """Distance between two computations of the same numbers."""

    max_nats: float
    mean_nats: float
    gradient: float
    """Relative norm, the larger one of embeddings and parameters."""

    def within(self, limit: "Gap") -> bool:
        """Whether every number is at most that of ``limit``; NaN is not."""
        mine, most = dataclasses.astuple(self), dataclasses.astuple(limit)
        return all(a <= b for a, b in zip(mine, most, strict=True))

    def words(self, of: str) -> str:
        """Describe the gap of "logprobs" or "hidden states" (unit: their root mean square)."""
        unit = " nats" if of == LOGPROBS else ""
        return f"{of} differ by {self.max_nats:.2g}{unit} at most and {self.mean_nats:.2g} on average, the gradient by {self.gradient:.2g} of its norm"


LOGPROBS, HIDDEN_STATES = "logprobs", "hidden states"


@dataclasses.dataclass(frozen=True, slots=True)
class Numbers:
    """Logprobs or hidden states (N), and gradients of embeddings (K × D) and small parameters."""

    logprobs_N: Tensor
    embeddings_KD: Tensor
    parameters: Mapping[str, Tensor]


def compute(policy: Policy | Critic, rows: Sequence[PackedRow], function: Any, *, rounded: bool = False) -> Numbers:
    """Return the result of ``function`` and its gradients; ``rounded``: for rounded embeddings."""
    model = policy.model
    small = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel() <= layerwise.SMALL
    }
    calls = list[tuple[Tensor, Tensor]]()

    def keep(module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        embedded = output.detach()
        if rounded:
            noise = torch.rand(embedded.shape, generator=torch.Generator().manual_seed(len(calls))) * 2 - 1
            embedded = embedded * (1 + torch.finfo(embedded.dtype).eps * noise.to(embedded))
        calls.append((args[0] if args else kwargs["input"], embedded.requires_grad_()))
        return embedded.clone()  # some models change it in place

    hook = model.get_input_embeddings().register_forward_hook(keep, with_kwargs=True)
    try:
        logprobs_N = function()
    finally:
        hook.remove()
    weights_N = torch.randn(len(logprobs_N), generator=torch.Generator().manual_seed(1)).to(logprobs_N.device)
    inputs = [embedded for _, embedded in calls] + list(small.values())
    gradients = torch.autograd.grad(logprobs_N @ weights_N, inputs, allow_unused=True)
    filled = [
        torch.zeros_like(tensor) if grad is None else grad for tensor, grad in zip(inputs, gradients, strict=True)
    ]
    by_token = _by_token([ids for ids, _ in calls], filled[: len(calls)], rows)
    return Numbers(logprobs_N.detach(), by_token, dict(zip(small, filled[len(calls) :], strict=True)))


def of_group(part: Numbers, reference: Numbers, ranks: int, model: nn.Module) -> Numbers:
    """Return the sum of the parts of ``ranks`` ranks, of which the first has the logprobs.

    A divided weight's gradient has those of all groups' tokens: the ranks with the same experts average it.
    """
    logprobs_N = part.logprobs_N if len(part.logprobs_N) else torch.zeros_like(reference.logprobs_N)
    weights = dict(model.named_parameters())

    def summed(tensor: Tensor, group: Any) -> Tensor:
        whole = tensor.float() * (ranks / dist.get_world_size(group))
        dist.all_reduce(whole, group=group)
        return whole

    together = ulysses.group_of(ranks)
    parameters = {
        name: summed(gradient, experts.group_of(weights[name], same=True) or together)
        for name, gradient in part.parameters.items()
    }
    return Numbers(summed(logprobs_N, together), summed(part.embeddings_KD, together), parameters)


def _by_token(ids: Sequence[Tensor], gradients: Sequence[Tensor], rows: Sequence[PackedRow]) -> Tensor:
    """Return the summed gradient of each distinct token (K × D, float32)."""
    distinct = np.unique(
        np.concatenate([np.r_[row.prompt_token_ids, *[sample.token_ids for sample in row.samples]] for row in rows])
    )
    known = torch.from_numpy(distinct).to(gradients[0].device)
    summed = torch.zeros(len(known), gradients[0].shape[-1], device=known.device)
    for ids_BT, gradient_BTD in zip(ids, gradients, strict=True):
        places = torch.searchsorted(known, ids_BT.flatten().to(known.dtype))
        summed.index_add_(0, places, gradient_BTD.flatten(0, -2).float())
    return summed


def gap_between(measured: Numbers, reference: Numbers) -> Gap:
    apart_N = (measured.logprobs_N - reference.logprobs_N).abs()
    names = list(reference.parameters)
    return Gap(
        float(apart_N.max()),
        float(apart_N.mean()),
        max(
            _relative([measured.embeddings_KD], [reference.embeddings_KD]),
            _relative([measured.parameters[name] for name in names], [reference.parameters[name] for name in names]),
        ),
    )


def _relative(measured: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    apart = sum(float((a.float() - b.float()).square().sum()) for a, b in zip(measured, reference, strict=True))
    whole = sum(float(b.float().square().sum()) for b in reference)
    return math.sqrt(apart / whole) if whole else (0.0 if not apart else math.inf)
