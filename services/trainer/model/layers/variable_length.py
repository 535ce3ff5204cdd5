"""Variable-length attention on a GPU, by FlashAttention 4 or by torch (FlashAttention 2).

FlashAttention 4 (``flash_attn.cute``, extra ``flash-attention``) has kernels for Hopper and Blackwell; at a head size of
64 they were 1.6 to 2 times as fast as torch's on an H100. It compiles a kernel for each head size, type and mask when
first used, and keeps it in ``FLASH_ATTENTION_CUTE_DSL_CACHE_DIR``; others where all queries or all keys fit into one tile,
and for more than 256 sequences. Each such variant is compared with torch's, outputs and gradients, in all cases before
it is used; a variant that fails or differs stays with torch. At head sizes of 8 and 16 gradients differ (4.0.0b36).

Shapes: ``T`` tokens of all sequences, ``H`` heads (keys and values may have fewer), ``D`` head size.
"""

import dataclasses
import functools
import importlib.util
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

log = logging.getLogger(__name__)

VarlenKind = Literal["flash4", "torch"]
_HOPPER = 9
_LARGEST_HEAD = 256
_ROUNDING = 0.02
"""Largest difference between two attention kernels in half precision, as a share of the largest value."""
_SEQUENCES = (
    ((200, 200), (130, 330)),  # neither fits into one tile
    ((50, 50), (33, 330)),  # queries do
    ((90, 90),),  # keys do; the backward pass at head sizes above 64 has tiles of 64 queries and 96 or 128 keys
    ((40, 40), (33, 45)),  # both do
    ((5, 5), (3, 40)),  # and so do the queries of all heads with the same keys, which the forward pass puts together
)
"""Queries and keys of prompts and completions; a tile has 64 to 192 queries and 48 to 176 keys."""
_TINY, _MANY = (5, 5), 300
_CASES = tuple((*few, *[_TINY] * more) for few in _SEQUENCES for more in (0, _MANY))
_COMPILER_WARNING = "Argument aux_data"
"""Of the package's compiler, about an argument that the package itself leaves out."""
_CACHE = {
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(Path.home() / ".cache" / "flash_attention_cute_dsl"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Ends:
    """Bounds of each sequence's queries and keys (int32), and the longest of each."""

    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """What a kernel is compiled for."""

    heads: int
    key_heads: int
    size: int
    dtype: torch.dtype
    windowed: bool
    device: torch.device


def choose(query_THD: Tensor, key_heads: int, size: int, *, windowed: bool, flash4: bool) -> VarlenKind | None:
    """Return the kernels for heads of ``size``, or None if they support neither its type nor its device.

    Args:
        flash4: use FlashAttention 4 if it is installed and agrees with torch.
    """
    if not query_THD.is_cuda or query_THD.dtype not in (torch.bfloat16, torch.float16) or size > _LARGEST_HEAD:
        return None
    if not _torch_has_windows():
        return None
    variant = Variant(query_THD.shape[-2], key_heads, size, query_THD.dtype, windowed, query_THD.device)
    return "flash4" if flash4 and agrees(variant) else "torch"


def attend(
    kind: VarlenKind, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, ends: Ends, *, scale: float, window: int
) -> Tensor:
    """Return outputs (T × H × D): causal from the lower right, over ``window`` keys with the query's own (0: all)."""
    run = _by_flash4 if kind == "flash4" else _by_torch
    return run(query_THD.contiguous(), key_THD, value_THD, ends, scale, window)


def _by_torch(query: Tensor, key: Tensor, value: Tensor, ends: Ends, scale: float, window: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # The kernel supports shared keys; torch 2.11 has no flag for it.
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in parameters_of(varlen_attn) else {}
    out: Tensor = varlen_attn(
        query,
        key,
        value,
        ends.query_ends,
        ends.key_ends,
        ends.longest_query,
        ends.longest_key,
        scale=scale,
        window_size=(window - 1 if window else -1, 0),  # keys before and after the query's own
        **options,
    )  # type: ignore[assignment]  # a tuple only where more is asked for
    return out


def _by_flash4(query: Tensor, key: Tensor, value: Tensor, ends: Ends, scale: float, window: int) -> Tensor:
    out: Tensor = _flash4()(
        query,
        key,
        value,
        cu_seqlens_q=ends.query_ends,
        cu_seqlens_k=ends.key_ends,
        max_seqlen_q=ends.longest_query,
        max_seqlen_k=ends.longest_key,
        softmax_scale=scale,
        causal=not window,
        window_size=(window - 1, 0) if window else (None, None),
    )[0]
    return out


@functools.cache
def agrees(variant: Variant) -> bool:
    """Whether FlashAttention 4 is installed, runs on the device, and computes what torch does.

    Torch's deterministic algorithms rule it out. Compiles the variant, for seconds unless an earlier process did.
    """
    if torch.are_deterministic_algorithms_enabled() or torch.cuda.get_device_capability(variant.device)[0] < _HOPPER:
        return False
    try:
        if not is_installed():
            return False
        # In a thread of its own: hooks on saved tensors, as of activation checkpointing, belong to a thread.
        with ThreadPoolExecutor(1) as apart:
            difference = apart.submit(_difference, variant).result()
    except Exception as error:  # noqa: BLE001 (of a compiler, or of versions that do not fit)
        log.warning("FlashAttention 4 is not used: it failed", extra={"variant": str(variant), "detail": str(error)})
        return False
    if not difference <= _ROUNDING:  # also catches NaN
        log.warning(
            "FlashAttention 4 is not used: it differs", extra={"variant": str(variant), "difference": difference}
        )
        return False
    return True


def is_installed() -> bool:
    """Whether the package has it; raises what an older one's import does."""
    return (
        importlib.util.find_spec("flash_attn") is not None and importlib.util.find_spec("flash_attn.cute") is not None
    )


def _difference(variant: Variant) -> float:
    """Return the largest relative difference to torch's outputs and gradients in all cases."""
    differences = [difference for case in _CASES for difference in _differences(variant, case)]
    return max(differences, key=lambda each: float("inf") if each != each else each)


def _differences(variant: Variant, sequences: Sequence[tuple[int, int]]) -> list[float]:
    """Return those of the outputs and of each gradient; ``sequences``: numbers of queries and keys."""
    generator = torch.Generator(variant.device).manual_seed(0)
    where: dict[str, Any] = {"device": variant.device, "dtype": torch.int32}
    queries, keys = zip(*sequences, strict=True)
    ends = Ends(_ends(queries, where), _ends(keys, where), max(queries), max(keys))

    def drawn(tokens: int, heads: int) -> Tensor:
        drawn = torch.randn(tokens, heads, variant.size, generator=generator, device=variant.device)
        return drawn.to(variant.dtype).requires_grad_()

    if variant.device.type == "cuda":
        torch.cuda.set_device(variant.device)
    with torch.enable_grad():
        query = drawn(sum(queries), variant.heads)
        key, value = drawn(sum(keys), variant.key_heads), drawn(sum(keys), variant.key_heads)
        arriving = drawn(sum(queries), variant.heads).detach()
        results = []
        for run in (_by_torch, _by_flash4):
            out = run(query, key, value, ends, variant.size**-0.5, 100 if variant.windowed else 0)
            results.append((out.detach(), *torch.autograd.grad(out, (query, key, value), arriving)))
    return [float((left - right).abs().max() / left.abs().max()) for left, right in zip(*results, strict=True)]


def _ends(lengths: tuple[int, ...], where: dict[str, Any]) -> Tensor:
    return torch.tensor([sum(lengths[:count]) for count in range(len(lengths) + 1)], **where)


@functools.cache
def _flash4() -> Callable[..., Any]:
    for name, value in _CACHE.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", _COMPILER_WARNING, UserWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the package's, of its own compiler
        from flash_attn.cute import flash_attn_varlen_func

    function: Callable[..., Any] = flash_attn_varlen_func
    return function


def _torch_has_windows() -> bool:
    """Whether torch (2.11 and later) has variable-length causal attention."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "window_size" in parameters_of(varlen_attn)


@functools.cache
def parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
