"""Attention with sinks, capped scores, and values of another size than queries.

    scores_h  = scale · q kᵀ,  or  cap · tanh(scale · q kᵀ / cap)  with a cap (Gemma 2, arXiv:2408.00118)
    weights_h = softmax over visible keys and a sink of score ``sink_h`` and value 0, if any (gpt-oss, arXiv:2508.10925)

A sink is a key: queries get two dimensions with ``sink_h / scale`` and its rounding rest; its key has 1 there and 0
elsewhere, other keys 0 there. So any attention function computes sinks.

Shapes: ``G`` sequences, ``H`` heads (keys and values may have fewer), ``Q`` queries, ``K`` keys, ``D`` head size, ``T``
tokens of all sequences.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.services.trainer.model.layers import variable_length
from penstock.services.trainer.model.layers.attention_layout import Ragged
from penstock.services.trainer.model.layers.gather import gather_rows
from penstock.services.trainer.model.layers.variable_length import VarlenKind

_SINK_SIZES = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Extras:
    scale: float | None = None
    """None: 1 / √(query size)."""
    softcap: float | None = None
    sinks_H: Tensor | None = None


PLAIN = Extras()


def attend_masked(
    query_GHQD: Tensor, key_GHKD: Tensor, value_GHKD: Tensor, mask: Tensor | None, extras: Extras
) -> Tensor:
    """Return attention's outputs (G × H × Q × value size).

    ``mask``: visible keys (bool, broadcast to G × H × Q × K); None: causal.
    """
    size, scale = value_GHKD.shape[-1], _scale(query_GHQD, extras)
    if mask is None and (extras.softcap is not None or extras.sinks_H is not None):
        mask = torch.ones(query_GHQD.shape[2], key_GHKD.shape[2], dtype=torch.bool, device=query_GHQD.device).tril()
    if extras.softcap is not None:
        assert mask is not None
        return _softmax_of_capped(
            query_GHQD, key_GHKD, value_GHKD, mask, extras.sinks_H, scale=scale, cap=extras.softcap
        )
    if extras.sinks_H is not None:
        assert mask is not None
        query_GHQD = torch.cat((query_GHQD, _sink_query(query_GHQD, extras.sinks_H[:, None], scale)), -1)
        key_GHKD, value_GHKD = with_sink_key(key_GHKD, value_GHKD)
        mask = F.pad(mask, (1, 0), value=True)
    query, key, value = _of_equal_sizes(query_GHQD, key_GHKD, value_GHKD)
    key, value = _of_equal_heads(query.shape[1], key, value)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out[..., :size]


def attend_ragged(
    kind: VarlenKind,
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    where: Ragged,
    extras: Extras,
    window: int = 0,
) -> Tensor:
    """Return outputs (T × H × value size) of variable-length attention: causal, from the lower right.

    A sink's key and value are first (:func:`with_sink_key`). ``extras`` has no cap; ``window`` includes the query (0:
    all).
    """
    assert extras.softcap is None
    assert extras.sinks_H is None or not window, "a sink is the first key, which a window would hide"
    size, scale = value_THD.shape[-1], _scale(query_THD, extras)
    if extras.sinks_H is not None:
        query_THD = torch.cat((query_THD, _sink_query(query_THD, extras.sinks_H, scale)), -1)
    key, value = gather_rows(key_THD, where.keys), gather_rows(value_THD, where.keys)
    query, key, value = _of_equal_sizes(query_THD, key, value)
    return variable_length.attend(kind, query, key, value, where.ends, scale=scale, window=window)[..., :size]


def with_sink_key(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Add the sink's dimensions to ``key``, and its key and value in front (dimension −2)."""
    key = F.pad(key, (0, _SINK_SIZES))
    sink = torch.zeros_like(key[..., :1, :])
    sink[..., -_SINK_SIZES:] = 1
    return torch.cat((sink, key), -2), F.pad(value, (0, 0, 1, 0))


def with_ragged_sink_key(key_THD: Tensor, value_THD: Tensor) -> tuple[Tensor, Tensor]:
    key, value = with_sink_key(key_THD.transpose(0, 1), value_THD.transpose(0, 1))
    return key.transpose(0, 1), value.transpose(0, 1)


def padded_size(query: Tensor, value: Tensor, *, sinks: bool) -> int:
    """Return the kernels' head size: the larger of query and value, plus the sink's, rounded up to a multiple of 8."""
    largest = max(query.shape[-1] + (_SINK_SIZES if sinks else 0), value.shape[-1])
    return -(-largest // 8) * 8


def _scale(query: Tensor, extras: Extras) -> float:
    return float(query.shape[-1] ** -0.5 if extras.scale is None else extras.scale)


def _sink_query(query: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Return the two sink dimensions; their scaled sum is the sink's score."""
    exact = sinks.float() / scale
    rounded = exact.to(query.dtype)
    rest = (exact - rounded.float()).detach().to(query.dtype)  # the gradient goes only through the first
    return torch.stack((rounded, rest), -1).expand(*query.shape[:-1], _SINK_SIZES)


def _of_equal_sizes(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad with zeros to one size; on GPUs a multiple of 8."""
    sizes = {tensor.shape[-1] for tensor in tensors}
    largest = max(sizes)
    if tensors[0].is_cuda:
        largest = -(-largest // 8) * 8
    if sizes == {largest}:
        return tensors
    return tuple(F.pad(tensor, (0, largest - tensor.shape[-1])) for tensor in tensors)


def _of_equal_heads(heads: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)
        for tensor in tensors
    )


def _softmax_of_capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks_H: Tensor | None, *, scale: float, cap: float
) -> Tensor:
    key, value = _of_equal_heads(query.shape[1], key, value)
    scores = cap * torch.tanh(query.float() @ key.float().transpose(-1, -2) * (scale / cap))
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((sinks, scores), -1)
    weights = torch.softmax(scores, -1)
    return (weights[..., 1:] if sinks_H is not None else weights).to(value.dtype) @ value
