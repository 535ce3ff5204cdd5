"""The model as transformers runs it, with the trainer's own weights.

The trainer's changes are switched off only within :func:`unmodified`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.services.trainer.batch.packing import PackedRow
from penstock.services.trainer.batch.segments import Int64Array
from penstock.services.trainer.model import experts
from penstock.services.trainer.model.layers import kernels
from penstock.shared.bus.branches import branches
from penstock.shared.model.causal_model import eager_attention


@contextlib.contextmanager
def unmodified(model: Any) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with eager_attention(model), kernels.unfused(model), experts.unmodified(model):
            yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    dropouts = [
        inner for inner in module.modules() if isinstance(inner, nn.modules.dropout._DropoutNd) and inner.training
    ]
    for inner in dropouts:
        inner.training = False
    try:
        yield
    finally:
        for inner in dropouts:
            inner.training = True


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Alone:
    """A completion or branch after its prompt; ``targets_N`` are the places of the tokens that are trained in it."""

    ids_T: Int64Array
    targets_N: Int64Array


def sequences(row: PackedRow) -> Iterator[Alone]:
    prompt = row.prompt_token_ids
    for sample in row.samples:
        for branch in branches(sample):
            ids = np.concatenate((prompt, sample.token_ids[branch.before], sample.token_ids[branch.places]))
            first = len(ids) - len(branch.places)
            yield Alone(ids.astype(np.int64), first + np.flatnonzero(sample.sampled[branch.places]))


def logprobs(model: Any, rows: Sequence[PackedRow], device: torch.device) -> Tensor:
    """One sequence at a time (N, float32, nats)."""
    parts = list[Tensor]()
    for row in rows:
        for of in sequences(row):
            all_NV = _all_logprobs(model, of.ids_T[:-1], of.targets_N - 1, row, device)
            targets_N = torch.from_numpy(of.ids_T[of.targets_N]).to(device)
            parts.append(all_NV.gather(-1, targets_N[:, None])[:, 0])
    return torch.cat(parts)


def unit_hidden_states(hidden_ND: Tensor) -> Tensor:
    """Return hidden states, each divided by its root mean square (N·D, float32)."""
    return torch.nn.functional.rms_norm(hidden_ND.float(), hidden_ND.shape[-1:]).flatten()


def hidden_states(trunk: Any, rows: Sequence[PackedRow], device: torch.device) -> Tensor:
    """Return :func:`unit_hidden_states` before each token of the rows' completions."""
    parts = [
        _hidden_states(trunk, of.ids_T[:-1], device)[torch.from_numpy(of.targets_N - 1).to(device)]
        for row in rows
        for of in sequences(row)
    ]
    return unit_hidden_states(torch.cat(parts))


def hidden_states_ahead(trunk: Any, row: PackedRow, device: torch.device) -> float:
    """Return how much the hidden state of ``row``'s prompt depends on the completion, by its root mean square."""
    with torch.no_grad():
        longest, prompt = max((of.ids_T for of in sequences(row)), key=len), len(row.prompt_token_ids)
        first, second = (_hidden_states(trunk, ids, device)[prompt - 1] for ids in (longest, longest[:prompt]))
        return float((unit_hidden_states(first) - unit_hidden_states(second)).abs().mean())


def _hidden_states(trunk: Any, ids: Int64Array, device: torch.device) -> Tensor:
    hidden_TD: Tensor = trunk(input_ids=torch.from_numpy(ids[None]).to(device), use_cache=False).last_hidden_state[0]
    return hidden_TD


def sees_ahead_nats(model: Any, row: PackedRow, device: torch.device) -> float:
    """Return how much logprobs after ``row``'s prompt depend on the completion: 0 if causal."""
    with torch.no_grad():
        longest, prompt = max((of.ids_T for of in sequences(row)), key=len), len(row.prompt_token_ids)
        last = np.array([prompt - 1])
        with_completion_V = _all_logprobs(model, longest, last, row, device)[0]
        alone_V = _all_logprobs(model, longest[:prompt], last, row, device)[0]
        return float((with_completion_V - alone_V).abs().mean())


def _all_logprobs(model: Any, ids: Int64Array, places_N: Int64Array, row: PackedRow, device: torch.device) -> Tensor:
    """Return the logprobs after some places (N × vocabulary, float32)."""
    output = model(input_ids=torch.from_numpy(ids[None]).to(device), use_cache=False)
    logits_NV: Tensor = output.logits[0, torch.from_numpy(places_N).to(device)].float()
    return torch.log_softmax(logits_NV / row.temperature, dim=-1)
