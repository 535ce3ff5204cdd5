"""From each rank's copy plan, its share of the weights, and the swap from a share.

::

    each rank     plan ──pieces_of──▶ the pieces of every bucket that its parameters need
    the replica   agree(all ranks' pieces) ──▶ Share per rank, or SharesRefused: every rank receives the whole version
    each rank     packed(plan, share, shadow) ──▶ the plan over a shadow of the share's size

Every byte of the layout must be in exactly one class of pieces, which is what the checksums prove
(:mod:`penstock.shared.weights.format.shares`).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from penstock.services.rollout.engines.vllm.swap.byte_coverage import (
    Intervals,
    TouchedTwice,
    first_missing,
    intervals,
    union,
)
from penstock.services.rollout.engines.vllm.swap.copies import Copy, CopyPlan, Region, coalesced
from penstock.shared.weights.format.layout import Layout
from penstock.shared.weights.format.shares import Piece, Pieces, Share, digest, places, slot_bytes


class SharesRefused(Exception):
    """The ranks' plans do not divide the weights."""


def pieces_of(plan: CopyPlan, buckets: int) -> Pieces:
    """Return what ``plan`` reads of each bucket, each piece once."""
    pieces: list[set[Piece]] = [set() for _ in range(buckets)]
    for copy in plan.recorded:
        pieces[copy.source.storage].add(_piece(copy.source))
    return tuple(tuple(sorted(bucket, key=lambda piece: (piece.offset, piece.run, piece.dims))) for bucket in pieces)


def agree(layout: Layout, ranks: Sequence[Pieces]) -> list[Share]:
    """Return each rank's share; raises SharesRefused if not every byte is in exactly one class of pieces."""
    classes: list[list[tuple[str, ...]]] = [[] for _ in ranks]
    for number in range(len(layout.bucket_bytes)):
        holders: dict[Piece, list[str]] = defaultdict(list)
        for rank, pieces in enumerate(ranks):
            for piece in pieces[number]:
                holders[piece].append(str(rank))
        _prove(layout, number, list(holders))
        for rank, pieces in enumerate(ranks):
            classes[rank].append(tuple(",".join(holders[piece]) for piece in pieces[number]))
    slots, name = slot_bytes(ranks), digest(ranks)
    return [Share(pieces, tuple(classes[rank]), slots, name) for rank, pieces in enumerate(ranks)]


def packed(plan: CopyPlan, share: Share, buckets: Sequence[torch.Tensor]) -> CopyPlan:
    """Return ``plan`` over packed ``buckets``; raises SharesRefused if it reads other pieces than the share's."""
    at = [dict(zip(pieces, places(pieces), strict=True)) for pieces in share.pieces]
    copies = []
    for copy in plan.recorded:
        place = at[copy.source.storage].get(_piece(copy.source))
        if place is None:
            raise SharesRefused("the model's loader reads other bytes than when its share was planned")
        copies.append(Copy(copy.destination, _packed(copy.source, place)))
    return plan.over(coalesced(copies), [bucket.untyped_storage() for bucket in buckets])


def _prove(layout: Layout, number: int, pieces: Sequence[Piece]) -> None:
    try:
        covered = union([_touched(piece) for piece in pieces])
    except TouchedTwice as error:
        raise SharesRefused(f"ranks need overlapping parts of {_name(layout, number, error.byte)}") from error
    for entry in layout.tensors:
        if entry.bucket == number:
            missing = first_missing(covered, intervals(entry.offset, (entry.nbytes,), (1,), 1))
            if missing is not None:
                raise SharesRefused(f"no rank needs byte {missing - entry.offset} of {entry.name}")


def _name(layout: Layout, number: int, byte: int) -> str:
    within = (entry for entry in layout.tensors if entry.bucket == number and entry.offset + entry.nbytes > byte)
    return next((entry.name for entry in within), "the padding")


def _touched(piece: Piece) -> Intervals:
    shape, strides = [size for size, _ in piece.dims], [stride for _, stride in piece.dims]
    return intervals(piece.offset, (*shape, piece.run), (*strides, 1), 1)


def _dimensions(region: Region) -> Iterator[tuple[int, int, int]]:
    """Yield (stride, size, index) of the dimensions that move, innermost first."""
    pairs = zip(region.strides, region.shape, strict=True)
    yield from sorted((stride, size, index) for index, (stride, size) in enumerate(pairs) if stride and size > 1)


def _piece(region: Region) -> Piece:
    run, dims = region.dtype.itemsize, list[tuple[int, int]]()
    for stride, size, _ in _dimensions(region):
        stride_bytes = stride * region.dtype.itemsize
        if not dims and stride_bytes == run:
            run *= size
        elif dims and stride_bytes == dims[-1][0] * dims[-1][1]:
            dims[-1] = (dims[-1][0] * size, dims[-1][1])
        else:
            dims.append((size, stride_bytes))
    return Piece(region.offset, run, tuple(reversed(dims)))


def _packed(region: Region, place: int) -> Region:
    strides, step = [0] * len(region.shape), 1
    for _, size, index in _dimensions(region):
        strides[index] = step
        step *= size
    return dataclasses.replace(region, offset=place, strides=tuple(strides))
