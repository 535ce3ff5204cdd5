"""Rows whose tokens several ranks hold (``trainer.sequence_parallel``): each rank attends with some of the heads, to all tokens.

Ulysses (Jacobs et al. 2023, arXiv:2309.14509): all-to-all before and after attention, everything else token by token::

    rank    tokens, all heads                    all tokens, some heads
    0       t0 t1 · h0 h1 h2 h3    to_heads ▶    t0 t1 t2 t3 · h0 h1
    1       t2 t3 · h0 h1 h2 h3  ◀ to_tokens     t0 t1 t2 t3 · h2 h3

Keys and values of fewer heads than ranks are repeated. Groups are of neighbouring ranks. All is collective in a group.

Shapes: ``t`` this rank's tokens, ``T`` the row's, ``H`` heads (keys and values may have fewer), ``D`` a head's size, ``R`` ranks,
``W`` numbers of a rank's heads, ``n`` this rank's trained tokens, ``N`` the row's, ``C`` columns.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.services.trainer.batch.packing import Shard
from penstock.shared.errors import SettingsError


def group_of(ranks: int) -> dist.ProcessGroup:
    """Return this rank's group of ``ranks``; collective among all ranks when first called."""
    return _group(dist.group.WORLD, ranks)


@functools.cache
def _group(_world: dist.ProcessGroup | None, ranks: int) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_subgroups(group_size=ranks)[0]  # type: ignore[no-untyped-call, unused-ignore]
    return group


def index(ranks: int) -> int:
    """Return this rank's place in its group."""
    return dist.get_rank() % ranks if ranks > 1 else 0


def to_heads(ranks: int, *tensors_tHD: Tensor) -> list[Tensor]:
    """Return queries, keys and values of all tokens (T × H/R × D each), for this rank's heads.

    Raises:
        SettingsError: ``ranks`` does not divide the queries' heads.
    """
    if (heads := tensors_tHD[0].shape[1]) % ranks:
        raise SettingsError(
            f"expected trainer.sequence_parallel to divide the attention heads of the model, found {ranks} and {heads} heads: change it"
        )
    parts = [_by_rank(tensor, ranks) for tensor in tensors_tHD]
    whole_TW = exchange(torch.cat(parts, -1).transpose(0, 1), group_of(ranks)).flatten(0, 1)
    pieces = torch.split(whole_TW, [part.shape[-1] for part in parts], -1)
    return [piece.reshape(len(piece), -1, tensor.shape[-1]) for piece, tensor in zip(pieces, tensors_tHD, strict=True)]


def _by_rank(tensor_tHD: Tensor, ranks: int) -> Tensor:
    """Return each rank's heads (t × R × W)."""
    times = ranks // math.gcd(ranks, tensor_tHD.shape[1])
    repeated = tensor_tHD.repeat_interleave(times, 1) if times > 1 else tensor_tHD
    return repeated.reshape(len(repeated), ranks, -1)


def to_tokens(ranks: int, out_THD: Tensor) -> Tensor:
    """Return this rank's tokens of all heads (t × H × D)."""
    tokens, heads, size = len(out_THD) // ranks, out_THD.shape[1] * ranks, out_THD.shape[2]
    received_RtW = exchange(out_THD.reshape(ranks, tokens, -1), group_of(ranks))
    return received_RtW.transpose(0, 1).reshape(tokens, heads, size)


def own_heads(ranks: int, numbers_H: Tensor) -> Tensor:
    """Return the numbers of this rank's heads."""
    return numbers_H.chunk(ranks)[index(ranks)]


def to_first(own_nC: Tensor, shard: Shard) -> Tensor:
    """Return the rows of all trained tokens (N × C) on the group's first rank, none on the others.

    The first rank's gradient goes back to all.
    """
    places = torch.from_numpy(shard.places_N).to(own_nC.device)
    rows: Tensor = _ToFirst.apply(own_nC, places, shard.trained, shard.part.ranks)  # type: ignore[no-untyped-call]
    return rows


def exchange(
    rows: Tensor, group: Any, received: Sequence[int] | None = None, sent: Sequence[int] | None = None
) -> Tensor:
    """Return the rows of all ranks for this one, ``received`` from and ``sent`` to each; None: equally many. The gradient goes back."""
    exchanged: Tensor = _Exchange.apply(rows, group, received, sent)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, received: Any, sent: Any) -> Tensor:
        ctx.back = group, sent, received
        exchanged = rows.new_empty(len(rows) if received is None else sum(received), *rows.shape[1:])
        dist.all_to_all_single(exchanged, rows.contiguous(), received, sent, group=group)
        return exchanged

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return exchange(gradients[0], *ctx.back), None, None, None


class _ToFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_nC: Tensor, places: Tensor, trained: int, ranks: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.trained, ctx.ranks = trained, ranks
        rows = own_nC.new_zeros(trained, *own_nC.shape[1:])
        rows[places] = own_nC
        dist.all_reduce(rows, group=group_of(ranks))  # each row is of one rank
        return rows if index(ranks) == 0 else rows.new_empty(0, *rows.shape[1:])

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        first = index(ctx.ranks) == 0
        rows = gradient.contiguous() if first else gradient.new_empty(ctx.trained, *gradient.shape[1:])
        dist.broadcast(rows, group=group_of(ctx.ranks), group_src=0)
        return rows[places], None, None, None
