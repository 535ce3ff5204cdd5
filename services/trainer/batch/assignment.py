"""Assign a step's rows to ranks and micro-batches.

Rows over the cap are split between completions. Pieces go to ranks by cost (``flops``), costliest first. On a rank,
first-fit-decreasing gives the number of micro-batches, or there are fewer, if splitting further rows repeats few tokens
of prompts; costs are balanced among them, as ranks wait for each other at ZeRO stage 3. All ranks compute the same plan,
with equally many micro-batches.

With ``trainer.sequence_parallel`` samples that are longer than the cap come first, each in a micro-batch that a group of
ranks computes together (``shards``). Groups without one begin with their own micro-batches::

    rank 0    aaaa  c     g             a: a long sample
    rank 1    aaaa  d     h
    rank 2    b     e     i
    rank 3    b     f     -
"""

import math
from collections.abc import Sequence

from penstock.services.trainer.batch import shards
from penstock.services.trainer.batch.packing import (
    TOKENS_ALONE,
    MicroBatch,
    PackedRow,
    micro_batch,
    only,
    part,
    split_row,
)
from penstock.shared.model.flops import ModelSizes

_REPEATED = 0.02
"""Of all tokens: prompts that may be repeated so that there are fewer micro-batches."""
_TRIED, _FEWER = (1.0, 1.04, 1.12), 0.9
"""Times the least number of micro-batches; at most this share of what first-fit-decreasing needs."""


def plan(
    rows: Sequence[PackedRow],
    max_tokens: int,
    ranks: int,
    *,
    split: bool = True,
    sizes: ModelSizes = TOKENS_ALONE,
    sequence_parallel: int = 1,
) -> list[list[MicroBatch]]:
    """Return the micro-batches of each rank, equally many for each.

    ``max_tokens`` is of one rank, and exceeded only by indivisible rows; ``sizes`` are for costs;
    ``sequence_parallel`` ranks are in a group.
    """
    long, short = _by_length(rows, max_tokens, split=split) if sequence_parallel > 1 else ([], rows)
    most, groups = sequence_parallel * max_tokens, ranks // sequence_parallel
    together: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for group, chunks in enumerate(assign_pieces(long, most, groups, split=split, sizes=sizes)):
        for whole in (micro_batch(chunk, sizes) for chunk in chunks if chunk):
            for member, share in enumerate(shards.split(whole, sequence_parallel)):
                together[group * sequence_parallel + member].append(share)
    alone = assign_pieces(short, max_tokens, ranks, split=split, sizes=sizes, begun=together)
    return [
        [*first, *(micro_batch(chunk, sizes) for chunk in chunks)]
        for first, chunks in zip(together, alone, strict=True)
    ]


def _by_length(rows: Sequence[PackedRow], max_tokens: int, *, split: bool) -> tuple[list[PackedRow], list[PackedRow]]:
    """Return the rows of samples that need more than ``max_tokens``, and those of the others."""
    long, short = list[PackedRow](), list[PackedRow]()
    for row in rows:
        whole = row.size > max_tokens
        longer = [whole and (not split or only(row, [n]).size > max_tokens) for n in range(len(row.samples))]
        for of, chosen in ((long, True), (short, False)):
            if kept := [n for n, is_long in enumerate(longer) if is_long == chosen]:
                of.append(only(row, kept))
    return long, short


def assign_pieces(
    rows: Sequence[PackedRow],
    max_tokens: int,
    ranks: int,
    *,
    split: bool = True,
    sizes: ModelSizes = TOKENS_ALONE,
    begun: Sequence[Sequence[MicroBatch]] = (),
) -> list[list[list[PackedRow]]]:
    """Return the pieces of each micro-batch of each rank, which come after those in ``begun``."""
    pieces = [piece for row in rows for piece in (split_row(row, max_tokens) if split else [row])]
    shares: list[list[PackedRow]] = [[] for _ in range(ranks)]
    begun = begun or [[] for _ in range(ranks)]
    loads = [sum(each.flops for each in first) for first in begun]
    for piece in sorted(pieces, key=lambda piece: -piece.flops(sizes)):  # stable: batch order breaks ties
        lightest = loads.index(min(loads))
        shares[lightest].append(piece)
        loads[lightest] += piece.flops(sizes)
    fitted, made = [_first_fit(share, max_tokens) for share in shares], [len(first) for first in begun]
    count = max(1, *(before + len(chunks) for before, chunks in zip(made, fitted, strict=True)))
    chosen = _in_fewer(shares, made, count, max_tokens, sizes) if split else None
    if chosen is None:
        rooms = [count - before for before in made]
        spread = [_spread(share, n, max_tokens, sizes, split=split) for share, n in zip(shares, rooms, strict=True)]
        others = [chunks + [[] for _ in range(n - len(chunks))] for chunks, n in zip(fitted, rooms, strict=True)]
        chosen = [each if each is not None else other for each, other in zip(spread, others, strict=True)]
    return [sorted(chunks, key=lambda chunk: -sum(row.flops(sizes) for row in chunk)) for chunks in chosen]


def _in_fewer(
    shares: Sequence[Sequence[PackedRow]], made: Sequence[int], count: int, max_tokens: int, sizes: ModelSizes
) -> list[list[list[PackedRow]]] | None:
    """Return micro-batches with which each rank has fewer than ``count`` after those ``made``, in which more rows are split, if hardly a token is repeated.

    Rows of a little more than half of ``max_tokens`` would otherwise fill half of every micro-batch.
    """
    tokens = [sum(row.size for row in share) for share in shares]
    least = max(1, *(before - -own // max_tokens for before, own in zip(made, tokens, strict=True)))
    for tried in sorted({math.ceil(least * more) for more in _TRIED}):
        if tried > _FEWER * count:
            break
        spread = [
            _spread(share, tried - before, max_tokens, sizes, split=True)
            for share, before in zip(shares, made, strict=True)
        ]
        fitting = [chunks for chunks in spread if chunks is not None]
        repeated = sum(row.size for chunks in fitting for chunk in chunks for row in chunk) - sum(tokens)
        if len(fitting) == len(shares) and repeated <= _REPEATED * sum(tokens):
            return fitting
    return None


def _first_fit(rows: Sequence[PackedRow], max_tokens: int) -> list[list[PackedRow]]:
    chunks: list[list[PackedRow]] = []
    rooms: list[int] = []
    for row in sorted(rows, key=lambda row: -row.size):
        place = next((place for place, room in enumerate(rooms) if room >= row.size), len(chunks))
        if place == len(chunks):
            chunks.append([])
            rooms.append(max_tokens)
        chunks[place].append(row)
        rooms[place] -= row.size
    return chunks


def _spread(
    rows: Sequence[PackedRow], count: int, max_tokens: int, sizes: ModelSizes, *, split: bool
) -> list[list[PackedRow]] | None:
    """Return ``rows`` in ``count`` micro-batches of similar cost; None if they do not fit."""
    chunks: list[list[PackedRow]] = [[] for _ in range(count)]
    rooms, loads = [max_tokens] * count, [0.0] * count
    waiting = list(reversed(rows))
    while waiting:
        row = waiting.pop()
        possible = [place for place in range(count) if rooms[place] >= row.size]
        if not possible:
            widest = rooms.index(max(rooms))
            fits = _fitting(row, rooms[widest]) if split else 0
            if not fits:
                return None
            waiting.append(part(row, fits, len(row.samples)))
            row, possible = part(row, 0, fits), [widest]
        lightest = min(possible, key=loads.__getitem__)
        chunks[lightest].append(row)
        rooms[lightest] -= row.size
        loads[lightest] += row.flops(sizes)
    return chunks


def _fitting(row: PackedRow, room: int) -> int:
    """Return how many of its samples fit; a merged row of one more may be shorter."""
    counts = range(len(row.samples), 0, -1)
    return next((count for count in counts if part(row, 0, count).size <= room), 0)
