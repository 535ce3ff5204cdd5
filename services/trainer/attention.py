"""Attention over rows that lie end to end, without padding and without a mask of all tokens by all tokens.

Installed as a model's attention through transformers' interface. A segment attends to its prompt and, causally, to itself::

    varlen   torch's ``varlen_attn`` (flash attention) over segments of different lengths; keys and values of a prompt are
             copied for each of its completions. CUDA, half precision.
    mask     segments of about the same size are gathered into one rectangle and go through scaled_dot_product_attention
             with a mask; a short row goes as a whole. Anywhere; what is padded is inside attention only.

``auto`` takes ``varlen`` where it runs. Both give the outputs of separate sequences. It applies no sliding window, and says so
where one would matter; it knows no loss and no settings object.

Shapes: ``B`` 1, ``H`` heads, ``G`` segments of a rectangle, ``T`` tokens, ``Q``, ``K`` its queries and keys, ``D`` a head's size.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.trainer.packing import Int64Array, MicroBatch, Segments
from shared.errors import SettingsError

Kind = Literal["auto", "mask", "varlen"]
NAME = "penstock_segments"
_SLACK_PAIRS = 1 << 16
_SHORT_ROW_TOKENS = 128
"""Rows up to here attend as a whole: many tiny segments cost more than what they need not see."""
_PADDED = 1.3
"""A rectangle may have so many times its segments' pairs, and ``_SLACK_PAIRS`` more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rectangle:
    """Segments that attend together; places are those of the row."""

    queries_GQ: Tensor
    keys_GK: Tensor
    mask_GQK: Tensor | None
    """What a query sees; None: causal, as prompts are."""


class Layout:
    """How the tokens of one micro-batch see one another; made once and used by every layer.

    Args:
        segments: of the micro-batch.
        kind: which attention.
        device: where the model is.
    """

    def __init__(self, segments: Segments, kind: Kind, device: torch.device) -> None:
        self._segments = segments
        self._kind = kind
        self._device = device
        self._rectangles: tuple[list[Rectangle], Tensor] | None = None
        self._ragged: tuple[Tensor, Tensor, Tensor, int, int] | None = None
        self.used = False
        self.longest = int((segments.prompt_lengths_K + segments.lengths_K).max())
        """Tokens of the longest sequence."""

    def attend(self, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, scale: float | None) -> Tensor:
        """Return what attention gives, B × T × H × D."""
        self.used = True
        query, key, value = (tensor.transpose(1, 2).squeeze(0) for tensor in (query_BHTD, key_BHTD, value_BHTD))
        if self._kind == "varlen" or (self._kind == "auto" and runs_varlen(query_BHTD)):
            return self._by_length(query, key, value, scale)[None]
        return self._by_rectangle(query, key, value, scale)[None]

    def _by_length(self, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scale: float | None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if self._ragged is None:
            self._ragged = ragged(self._segments, self._device)
        keys, query_ends, key_ends, longest_query, longest_key = self._ragged
        key, value = key_THD.index_select(0, keys), value_THD.index_select(0, keys)
        shared, options = query_THD.shape[1] // key_THD.shape[1], dict[str, Any]()
        if shared > 1 and "enable_gqa" in _parameters(varlen_attn):
            options["enable_gqa"] = True
        elif shared > 1:  # torch 2.11
            key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        found: Tensor = varlen_attn(
            query_THD.contiguous(),
            key,
            value,
            query_ends,
            key_ends,
            longest_query,
            longest_key,
            scale=scale,
            window_size=(-1, 0),  # causal, from the lower right corner: a completion's queries are its last keys
            **options,
        )  # type: ignore[assignment]  # a tuple only where more is asked for
        return found

    def _by_rectangle(self, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scale: float | None) -> Tensor:
        if self._rectangles is None:
            self._rectangles = rectangles(self._segments, self._device)
        found, places_T = self._rectangles
        parts = [_attend(one, query_THD, key_THD, value_THD, scale) for one in found]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole.index_select(0, places_T)


def _attend(one: Rectangle, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scale: float | None) -> Tensor:
    shared = query_THD.shape[1] // key_THD.shape[1]
    query_GHQD = _gather(query_THD, one.queries_GQ)
    key_GHKD, value_GHKD = _gather(key_THD, one.keys_GK), _gather(value_THD, one.keys_GK)
    if shared > 1:
        key_GHKD, value_GHKD = key_GHKD.repeat_interleave(shared, 1), value_GHKD.repeat_interleave(shared, 1)
    mask = None if one.mask_GQK is None else one.mask_GQK[:, None]
    out_GHQD = F.scaled_dot_product_attention(
        query_GHQD, key_GHKD, value_GHKD, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out_GHQD.transpose(1, 2).reshape(-1, *query_THD.shape[1:])


def _gather(tensor_THD: Tensor, places_GQ: Tensor) -> Tensor:
    gathered = tensor_THD.index_select(0, places_GQ.flatten())
    return gathered.view(*places_GQ.shape, *tensor_THD.shape[1:]).transpose(1, 2)


def runs_varlen(query: Tensor) -> bool:
    """Whether torch (2.11 and later) has variable-length causal attention for such a query."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    if query.shape[-1] > 256 or query.shape[-1] % 8:
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "window_size" in _parameters(varlen_attn)


@functools.cache
def _parameters(of: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(of).parameters)


def ragged(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Return the places of all keys, segment after segment; where queries and keys of each end; and the longest of both."""
    keys = [_keys(segments, k) for k in range(len(segments.starts_K))]
    lengths_K = segments.prompt_lengths_K + segments.lengths_K
    ends = [np.concatenate(([0], np.cumsum(found))).astype(np.int32) for found in (segments.lengths_K, lengths_K)]
    query_ends, key_ends = (torch.from_numpy(end).to(device) for end in ends)
    places = torch.from_numpy(np.concatenate(keys)).to(device)
    return places, query_ends, key_ends, int(segments.lengths_K.max()), int(lengths_K.max())


def _keys(segments: Segments, k: int) -> Int64Array:
    """Return the places that segment ``k`` sees, its prompt first."""
    prompt, start = segments.prompt_starts_K[k], segments.starts_K[k]
    return np.concatenate(
        (np.arange(prompt, prompt + segments.prompt_lengths_K[k]), np.arange(start, start + segments.lengths_K[k]))
    )


def rectangles(segments: Segments, device: torch.device) -> tuple[list[Rectangle], Tensor]:
    """Return blocks of similar sizes together, and where each token of the row lies in their outputs laid end to end."""
    blocks = coarse(segments)
    sees = _Sees(segments, device)
    found: list[Rectangle] = []
    places_T = np.empty(int(segments.lengths_K.sum()), dtype=np.int64)
    before = 0
    for members in similar(blocks):
        one = _rectangle(blocks, members, sees)
        height = one.queries_GQ.shape[1]
        for g, k in enumerate(members):
            start, length = blocks.starts_K[k], blocks.lengths_K[k]
            places_T[start : start + length] = np.arange(length) + before + g * height
        found.append(one)
        before += one.queries_GQ.numel()
    return found, torch.from_numpy(places_T).to(device)


def coarse(segments: Segments) -> Segments:
    """Return ``segments`` with those of a short row as one, which sees nothing beside itself."""
    ids_K = segments.prompt_starts_K
    tokens_K = np.bincount(ids_K, weights=segments.lengths_K)[ids_K].astype(np.int64)
    short_K = tokens_K <= _SHORT_ROW_TOKENS
    keep_K = ~short_K | (segments.starts_K == ids_K)
    return Segments(
        segments.starts_K[keep_K],
        np.where(short_K, tokens_K, segments.lengths_K)[keep_K],
        ids_K[keep_K],
        np.where(short_K, 0, segments.prompt_lengths_K)[keep_K],
    )


def similar(blocks: Segments) -> list[list[int]]:
    """Return the numbers of the blocks, largest first, in runs that waste little when padded to their largest."""
    widths_K = blocks.prompt_lengths_K + blocks.lengths_K
    order = sorted(range(len(widths_K)), key=lambda k: (-int(widths_K[k]), -int(blocks.lengths_K[k])))
    runs: list[list[int]] = []
    height = width = pairs = 0
    for k in order:
        own = int(blocks.lengths_K[k]) * int(widths_K[k])
        taller = max(height, int(blocks.lengths_K[k]))
        if runs and (len(runs[-1]) + 1) * taller * width <= _PADDED * (pairs + own) + _SLACK_PAIRS:
            runs[-1].append(k)
            height, pairs = taller, pairs + own
        else:
            runs.append([k])
            height, width, pairs = int(blocks.lengths_K[k]), int(widths_K[k]), own
    return runs


class _Sees:
    """What each place of the row sees: its segment from ``start`` to itself, and its prompt."""

    def __init__(self, segments: Segments, device: torch.device) -> None:
        ends_K = segments.prompt_starts_K + segments.prompt_lengths_K
        per_token = [
            np.repeat(found, segments.lengths_K) for found in (segments.starts_K, segments.prompt_starts_K, ends_K)
        ]
        self.device = device
        self._start_T, self._prompt_T, self._prompt_end_T = (torch.from_numpy(found).to(device) for found in per_token)

    def mask(self, queries_GQ: Tensor, keys_GK: Tensor) -> Tensor | None:
        """Return what is seen; −1 is padding, which as a query sees all. None where everything is plainly causal."""
        query, key = queries_GQ[:, :, None], keys_GK[:, None, :]
        start, prompt, end = (
            t[queries_GQ.clamp(min=0)][..., None] for t in (self._start_T, self._prompt_T, self._prompt_end_T)
        )
        if queries_GQ.shape == keys_GK.shape and bool(((start == keys_GK[:, :1, None]) | (query < 0)).all()):
            return None
        own = (key >= start) & (key <= query)
        return own | ((key >= prompt) & (key < end)) | (query < 0)


def _rectangle(blocks: Segments, members: list[int], sees: _Sees) -> Rectangle:
    height = int(blocks.lengths_K[members].max())
    width = int((blocks.prompt_lengths_K + blocks.lengths_K)[members].max())
    queries_GQ = np.full((len(members), height), -1, dtype=np.int64)
    keys_GK = np.full((len(members), width), -1, dtype=np.int64)
    for g, k in enumerate(members):
        keys = _keys(blocks, k)
        keys_GK[g, : len(keys)] = keys
        queries_GQ[g, : blocks.lengths_K[k]] = keys[blocks.prompt_lengths_K[k] :]
    queries, keys_found = torch.from_numpy(queries_GQ).to(sees.device), torch.from_numpy(keys_GK).to(sees.device)
    return Rectangle(queries.clamp(min=0), keys_found.clamp(min=0), sees.mask(queries, keys_found))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Be transformers' attention: with a ``layout`` over segments, otherwise plain scaled_dot_product_attention."""
    if layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return out, None
    if sliding_window is not None and layout.longest > sliding_window:
        raise SettingsError(
            f"expected sequences within the model's sliding window of {sliding_window} tokens, found {layout.longest}: "
            "lower sampling.max_new_tokens, or change policy.model"
        )
    if dropout:
        raise SettingsError(f"expected a model without dropout in attention, found {dropout}: change policy.model")
    return layout.attend(query, key, value, scaling), None


def install(model: Any) -> None:
    """Make ``model`` attend through this file; without a layout it attends causally, to rows without padding."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)  # without a mask of the same name, transformers makes none of T × T
    model.set_attn_implementation(NAME)


def hidden_states(trunk: Any, batch: MicroBatch, kind: Kind) -> Tensor:
    """Return the hidden state that predicts each trained token of ``batch`` (N × hidden size).

    Raises:
        SettingsError: the model does not attend through transformers' interface, or has what a layout cannot do.
    """
    device = next(trunk.parameters()).device
    layout = Layout(batch.segments, kind, device)
    hidden_BTD: Tensor = trunk(
        input_ids=torch.from_numpy(batch.input_ids_BT).to(device),
        position_ids=torch.from_numpy(batch.position_ids_BT).to(device),
        use_cache=False,
        layout=layout,
    ).last_hidden_state
    if not layout.used:
        raise SettingsError(
            f"expected a model that attends through transformers' attention interface, found {type(trunk).__name__}: "
            "change policy.model"
        )
    return hidden_BTD[0].index_select(0, torch.from_numpy(batch.columns_N).to(device))
