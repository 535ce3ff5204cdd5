"""Attention over packed rows, without padding or a full T × T mask.

Installed through transformers' interfaces. For a packed row, layers get a :class:`PackedMask`: the row's layout and a
pattern derived from the model's mask function. A segment attends to its prompt and to itself::

    flash4, varlen  flash attention (``variable_length``); a prompt's keys and values are copied for each completion.
                    CUDA, half precision; causal layers, windows, sinks without a window.
    mask            similar segments form one rectangle for scaled_dot_product_attention with a mask. Anywhere.

``auto`` and ``torch`` (without FlashAttention 4) choose per layer. Outputs equal those of separate sequences.

Shapes: ``B`` 1, ``H`` heads, ``T`` tokens, ``N`` trained tokens, ``D`` a head's size.
"""

import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.services.trainer.batch.packing import MicroBatch
from penstock.services.trainer.batch.segments import Segments
from penstock.services.trainer.model.layers import ulysses, variable_length
from penstock.services.trainer.model.layers.attention_layout import (
    CAUSAL,
    Pattern,
    Ragged,
    Rectangle,
    ragged,
    rectangles,
)
from penstock.services.trainer.model.layers.attention_math import (
    PLAIN,
    Extras,
    attend_masked,
    attend_ragged,
    padded_size,
    with_ragged_sink_key,
)
from penstock.services.trainer.model.layers.gather import copies, gather_rows
from penstock.services.trainer.model.layers.kernels import KernelKind
from penstock.services.trainer.model.layers.variable_length import VarlenKind
from penstock.shared.errors import SettingsError

AttentionKind = Literal["auto", "torch", "mask", "varlen", "flash4"]
NAME = "penstock_segments"
_HARMLESS = frozenset(
    [
        "position_ids",
        "cache_position",
        "use_cache",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "output_router_logits",
        "num_items_in_batch",
        "logits_to_keep",
    ]
)
_DEFAULTS: Mapping[str, tuple[Any, ...]] = {"is_causal": (True,), "deterministic": (True, False)}
"""Allowed values of other arguments, besides None."""


def kind_of(chosen: AttentionKind, kernels: KernelKind) -> AttentionKind:
    """Return ``chosen``, but "torch" for "auto" if the other kernels are torch's."""
    return "torch" if chosen == "auto" and kernels == "torch" else chosen


class CannotPack(SettingsError):
    """The model cannot process packed rows exactly."""


class PackedLayout:
    """Visibility among the tokens of one micro-batch, of which ``ranks`` ranks hold equal parts, shared by all layers."""

    def __init__(self, segments: Segments, kind: AttentionKind, device: torch.device, ranks: int = 1) -> None:
        self._segments = segments
        self._kind = kind
        self._device = device
        self._ranks = ranks
        self._rectangles: dict[tuple[Pattern, bool, bool], tuple[list[Rectangle], Tensor]] = {}
        self._ragged: dict[bool, Ragged] = {}
        self.used = 0
        self.longest = int((segments.before + segments.lengths_K).max())
        self.positions_T = torch.from_numpy(segments.positions).to(device).chunk(ranks)[ulysses.index(ranks)]
        """Of this rank's tokens."""

    def attend(
        self,
        query_BHTD: Tensor,
        key_BHTD: Tensor,
        value_BHTD: Tensor,
        pattern: Pattern = CAUSAL,
        extras: Extras = PLAIN,
    ) -> Tensor:
        self.used += 1
        query, key, value = (tensor.transpose(1, 2).squeeze(0) for tensor in (query_BHTD, key_BHTD, value_BHTD))
        if self._ranks == 1:
            return self._attend(query, key, value, pattern, extras)[None]
        query, key, value = ulysses.to_heads(self._ranks, query, key, value)
        if extras.sinks_H is not None:
            extras = dataclasses.replace(extras, sinks_H=ulysses.own_heads(self._ranks, extras.sinks_H))
        return ulysses.to_tokens(self._ranks, self._attend(query, key, value, pattern, extras))[None]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, extras: Extras) -> Tensor:
        kind = self._varlen(query, key, value, pattern, extras)
        if kind is not None:
            return self._by_length(kind, query, key, value, pattern, extras)
        return self._by_rectangle(query, key, value, pattern, extras)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, extras: Extras) -> VarlenKind | None:
        sinks = extras.sinks_H is not None
        exact = extras.softcap is None and (pattern.kind == "causal" or (pattern.kind == "window" and not sinks))
        if self._kind == "mask" or not exact:
            return None
        if self._kind == "varlen":
            return "torch"
        size, windowed = padded_size(query, value, sinks=sinks), pattern.kind == "window"
        flash4 = self._kind in ("auto", "flash4")
        chosen = variable_length.choose(query, key.shape[1], size, windowed=windowed, flash4=flash4)
        if self._kind == "flash4" and chosen != "flash4":
            raise CannotPack(
                f"expected FlashAttention 4 to compute what PyTorch does for heads of {size} in {query.dtype} on "
                f'{query.device}, found that it is missing, fails or differs: set internal.attention = "auto"'
            )
        return chosen

    def _by_length(
        self, kind: VarlenKind, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, extras: Extras
    ) -> Tensor:
        sinks = extras.sinks_H is not None
        if sinks:
            key, value = with_ragged_sink_key(key, value)
        if sinks not in self._ragged:
            self._ragged[sinks] = ragged(self._segments, self._device, first_keys=int(sinks))
        return attend_ragged(kind, query, key, value, self._ragged[sinks], extras, pattern.size)

    def _by_rectangle(self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, extras: Extras) -> Tensor:
        masked, capped = extras.sinks_H is not None, extras.softcap is not None
        key_of = (pattern, masked, capped)
        if key_of not in self._rectangles:
            self._rectangles[key_of] = rectangles(self._segments, self._device, pattern, masked=masked, capped=capped)
        laid_out, places_T = self._rectangles[key_of]
        attend = functools.partial(_recomputed, _attend) if capped else _attend
        parts = [attend(rectangle, query, key, value, extras) for rectangle in laid_out]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole.index_select(0, places_T)


def _attend(rectangle: Rectangle, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, extras: Extras) -> Tensor:
    mask = rectangle.mask_GQK() if callable(rectangle.mask_GQK) else rectangle.mask_GQK
    key, value = (_gather(tensor, rectangle.keys_GK) for tensor in (key_THD, value_THD))
    query = _gather(query_THD, rectangle.queries_GQ)
    out_GHQD = attend_masked(query, key, value, None if mask is None else mask[:, None], extras)
    return out_GHQD.transpose(1, 2).flatten(0, 1)


def _recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return a function's result, of which the gradient keeps the arguments alone."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    result: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result


def _gather(tensor_THD: Tensor, places_GQ: Tensor) -> Tensor:
    gathered = gather_rows(tensor_THD, places_GQ.flatten())
    return gathered.view(*places_GQ.shape, *tensor_THD.shape[1:]).transpose(1, 2)


class PackedMask:
    """A layer's mask for a packed row; a model that computes with it cannot be packed."""

    __slots__ = ("layout", "pattern")
    layout: PackedLayout
    pattern: Pattern | None
    """None: unknown, an error only if used (Qwen2-MoE has an unused window of 0 tokens)."""

    def __init__(self, layout: PackedLayout, pattern: Pattern | None) -> None:
        self.layout, self.pattern = layout, pattern

    def __getitem__(self, key: object) -> NoReturn:
        _refuse("a model that leaves attention's mask alone, found one that slices it")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"a model that leaves attention's mask alone, found one that reads the mask's {name}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _refuse(f"a model that leaves attention's mask alone, found one that computes {function.__name__} of it")


_PACKED: contextvars.ContextVar[PackedLayout | None] = contextvars.ContextVar("packed", default=None)


def see(
    *,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Any:
    """Implement transformers' mask; CannotPack for a model's own mask function."""
    layout = _PACKED.get()
    if layout is None:
        from transformers.masking_utils import sdpa_mask

        options = {"local_size": local_size, "use_vmap": use_vmap, "device": device}
        return sdpa_mask(mask_function=mask_function, **options, **others)
    if use_vmap:
        _refuse("a model with a causal mask, a window or chunks, found one with a mask of its own")
    pattern = _read(mask_function, local_size, layout.longest, torch.device(device))
    return PackedMask(layout, CAUSAL if pattern is not None and pattern.size >= layout.longest else pattern)


def _read(
    mask_function: Callable[..., Any], local_size: int | None, longest: int, device: torch.device
) -> Pattern | None:
    """Return the pattern that agrees with ``mask_function`` at edges and all magnitudes, or None."""
    size = local_size or 0
    edges = {multiple * size for multiple in range(4)} if size else {longest - 1, *(1 << i for i in range(20))}
    around = {edge + shift for edge in (0, *edges) for shift in (-1, 0, 1)}
    places = torch.tensor(sorted(place for place in around if 0 <= place < max(longest, 3 * size + 2)))
    query, key, zero = places[:, None], places[None, :], torch.zeros(1, 1, dtype=torch.long, device=device)
    seen = torch.as_tensor(mask_function(zero, zero, query.to(device), key.to(device))).cpu()
    candidates = (CAUSAL,) if local_size is None else (Pattern("window", size), Pattern("chunk", size))
    for pattern in candidates:
        if torch.equal(seen.expand(len(places), len(places)), pattern.sees(query, key)):
            return pattern
    return None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention; CannotPack for unknown arguments."""
    if isinstance(attention_mask, PackedMask):
        extras = _extras(others, scaling, dropout)
        layout, pattern = attention_mask.layout, attention_mask.pattern
        if pattern is None:
            _refuse("a model with a causal mask, a window or chunks, found one with another mask")
        _check_window(others.get("sliding_window"), pattern, layout.longest)
        tokens = (1, len(layout.positions_T))
        if (query.shape[0], query.shape[2]) != tokens or (key.shape[0], key.shape[2]) != tokens:
            _refuse(
                f"attention whose queries and keys are the tokens of the row, found {key.shape[2]} keys of {tokens[1]} tokens"
            )
        query = _at_positions(module, query, layout.positions_T)
        return layout.attend(query, key, value, pattern, extras), None
    if _PACKED.get() is not None:
        _refuse("a model whose mask is made by transformers' mask interface, found one that makes its own")
    return _attend_unpacked(module, query, key, value, attention_mask, scaling, dropout, others), None


def _attend_unpacked(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    others: Mapping[str, Any],
) -> Tensor:
    if others.get("softcap") is None and others.get("s_aux") is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out: Tensor = sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **others)[0]
        return out
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = mask.tril(key.shape[2] - query.shape[2])
    if mask.dtype != torch.bool:
        _refuse(f"a mask of booleans, found one of {mask.dtype}")
    extras = _extras(others, scaling, dropout)
    attend = attend_masked if extras.softcap is None else functools.partial(_recomputed, attend_masked)
    return attend(query, key, value, mask, extras).transpose(1, 2)


def _extras(others: Mapping[str, Any], scaling: float | None, dropout: float) -> Extras:
    if dropout:
        _refuse(f"attention without dropout, found {dropout}")
    for name, value in others.items():
        known = name in ("softcap", "s_aux", "sliding_window") or name in _HARMLESS
        if not known and value is not None and not any(value is default for default in _DEFAULTS.get(name, ())):
            _refuse(f"attention that is causal, windowed or chunked, with sinks or a cap at most, found {name}")
    return Extras(scale=scaling, softcap=others.get("softcap"), sinks_H=others.get("s_aux"))


def _at_positions(module: nn.Module, query_BHTD: Tensor, positions_T: Tensor) -> Tensor:
    """Apply Llama 4's temperature by positions in the sequence; transformers uses the row's."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query_BHTD
    floor, strength = float(module.floor_scale), float(module.attn_scale)  # type: ignore[arg-type]  # numbers of its config

    def factor(places_T: Tensor) -> Tensor:
        return torch.log1p(torch.floor((places_T.float() + 1.0) / floor)) * strength + 1.0

    ratio_T = factor(positions_T) / factor(torch.arange(len(positions_T), device=positions_T.device))
    return (query_BHTD * ratio_T[:, None]).to(query_BHTD.dtype)


def _check_window(window: int | None, pattern: Pattern, longest: int) -> None:
    own = pattern.size if pattern.kind == "window" else longest
    if window is not None and min(window, longest) != own:
        _refuse(f"a layer whose mask has its sliding window of {window}, found one of {own}")


def _refuse(expected: str) -> NoReturn:
    raise CannotPack(f"expected {expected}: packed rows cannot train it; change policy.model")


def install(model: Any) -> None:
    """Make ``model`` attend through this module; plain sequences as with sdpa."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, see)
    model.set_attn_implementation(NAME)


def decoder_of(model: Any) -> Any:
    """Return a causal language model without its output layer; CannotPack if that is impossible."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    for part in (model.get_decoder(), getattr(model, "base_model", None), getattr(model, "model", None)):
        parts = set(part.modules()) if isinstance(part, nn.Module) else set()
        if embedding in parts and part is not embedding and (output is None or output not in parts):
            return part
    _refuse(f"a model of an embedding, layers and an output layer, found {type(model).__name__}")


def hidden_states(trunk: Any, batch: MicroBatch, kind: AttentionKind) -> Tensor:
    if "position_ids" not in inspect.signature(trunk.forward).parameters:
        _refuse(f"a model that takes positions, found {type(trunk).__name__}")
    device = next(trunk.parameters()).device
    layout = PackedLayout(batch.segments, kind, device, batch.ranks)
    input_ids_BT = torch.from_numpy(batch.input_ids_BT).to(device)
    token = _PACKED.set(layout)
    try:
        hidden_BTD: Tensor = trunk(
            input_ids=input_ids_BT,
            attention_mask=torch.ones_like(input_ids_BT),  # else transformers infers sequences from positions
            position_ids=torch.from_numpy(batch.position_ids_BT).to(device),
            use_cache=False,
        ).last_hidden_state
    finally:
        _PACKED.reset(token)
    if not layout.used:
        _refuse(f"a model that attends through transformers' attention interface, found {type(trunk).__name__}")
    return gather_rows(hidden_BTD[0], copies(batch.columns_N, batch.tokens, device))
