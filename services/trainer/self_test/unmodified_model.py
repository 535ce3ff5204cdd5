"""The model as transformers runs it, with the trainer's own weights.

The trainer's changes are switched off only within :func:`unmodified`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from services.trainer.batch.packing import PackedRow
from services.trainer.batch.segments import Int64Array
from services.trainer.model.layers import kernels
from shared.model.causal_model import eager_attention


@contextlib.contextmanager
def unmodified(model: Any) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with eager_attention(model), kernels.unfused(model):
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


def sequences(row: PackedRow) -> list[Int64Array]:
    return [np.concatenate((row.prompt_token_ids, sample.token_ids)).astype(np.int64) for sample in row.samples]


def logprobs(model: Any, rows: Sequence[PackedRow], device: torch.device) -> Tensor:
    """One sequence at a time (N, float32, nats)."""
    parts = list[Tensor]()
    for row in rows:
        for ids in sequences(row):
            all_TV = _all_logprobs(model, ids[:-1], row, device)
            targets_T = torch.from_numpy(ids[len(row.prompt_token_ids) :]).to(device)
            parts.append(all_TV.gather(-1, targets_T[:, None])[:, 0])
    return torch.cat(parts)


def unit_hidden_states(hidden_ND: Tensor) -> Tensor:
    """Return hidden states, each divided by its root mean square (N·D, float32)."""
    return torch.nn.functional.rms_norm(hidden_ND.float(), hidden_ND.shape[-1:]).flatten()


def hidden_states(trunk: Any, rows: Sequence[PackedRow], device: torch.device) -> Tensor:
    """Return :func:`unit_hidden_states` before each token of the rows' completions."""
    parts = [_hidden_states(trunk, ids[:-1], row, device) for row in rows for ids in sequences(row)]
    return unit_hidden_states(torch.cat(parts))


def hidden_states_ahead(trunk: Any, row: PackedRow, device: torch.device) -> float:
    """Return how much the hidden state of ``row``'s prompt depends on the completion, by its root mean square."""
    with torch.no_grad():
        longest = max(sequences(row), key=len)
        alone = longest[: len(row.prompt_token_ids)]
        first, second = (_hidden_states(trunk, ids, row, device)[:1] for ids in (longest, alone))
        return float((unit_hidden_states(first) - unit_hidden_states(second)).abs().mean())


def _hidden_states(trunk: Any, ids: Int64Array, row: PackedRow, device: torch.device) -> Tensor:
    output = trunk(input_ids=torch.from_numpy(ids[None]).to(device), use_cache=False)
    hidden_TD: Tensor = output.last_hidden_state[0, len(row.prompt_token_ids) - 1 :]
    return hidden_TD


def sees_ahead_nats(model: Any, row: PackedRow, device: torch.device) -> float:
    """Return how much logprobs after ``row``'s prompt depend on the completion: 0 if causal."""
    with torch.no_grad():
        longest = max(sequences(row), key=len)
        with_completion_V = _all_logprobs(model, longest, row, device)[0]
        alone_V = _all_logprobs(model, longest[: len(row.prompt_token_ids)], row, device)[0]
        return float((with_completion_V - alone_V).abs().mean())


def _all_logprobs(model: Any, ids: Int64Array, row: PackedRow, device: torch.device) -> Tensor:
    """Return logprobs from the last prompt token on (T × vocabulary, float32)."""
    output = model(input_ids=torch.from_numpy(ids[None]).to(device), use_cache=False)
    logits_TV: Tensor = output.logits[0, len(row.prompt_token_ids) - 1 :].float()
    return torch.log_softmax(logits_TV / row.temperature, dim=-1)
