"""Which tokens of a packed row attend to which: blocks of queries with keys, and rectangles of similar blocks.

A segment attends to its ancestors and, causally, to itself; a :class:`Pattern` restricts this by distance in the sequence.
Blocks are split by reachable keys, so that a mask has about ``MASKED_PAIRS``, or 128 queries. A long segment after a
shorter prompt computes the prompt's queries again: it is plainly causal then, without masks, which would be quadratic in
its length.

Shapes: ``G`` blocks of a rectangle, ``T`` tokens of the row, ``K`` segments or keys, ``Q`` queries.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from penstock.services.trainer.batch.segments import Int64Array, Segments
from penstock.services.trainer.model.layers.gather import Copies, copies
from penstock.services.trainer.model.layers.variable_length import Ends

SHORT_ROW_TOKENS = 128
"""Shorter rows attend as a whole, which is cheaper than many segments."""
SLACK_PAIRS = 1 << 16
"""Tolerated padding of a rectangle, besides ``_PADDED``."""
MASKED_PAIRS = 1 << 22
"""Maximum of a masked rectangle."""
_PADDED = 1.3
_LOWEST, _HIGHEST = 128, 2048


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """Earlier tokens of the sequence that a token sees.

    ``causal``: all. ``window``: itself and the ``size − 1`` before it. ``chunk``: those of equal position // ``size``.
    """

    kind: Literal["causal", "window", "chunk"] = "causal"
    size: int = 0

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        seen = key <= query
        if self.kind == "window":
            return seen & (key > query - self.size)
        if self.kind == "chunk":
            return seen & (key // self.size == query // self.size)
        return seen

    def first_seen(self, position: int) -> int:
        if self.kind == "window":
            return max(0, position - self.size + 1)
        return position - position % self.size if self.kind == "chunk" else 0


CAUSAL = Pattern()


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Consecutive queries, and the places of their visible keys."""

    start: int
    length: int
    keys_K: Int64Array
    again: int = 0
    """Keys before the queries that are queries, too; what they attend to is not used."""

    @property
    def height(self) -> int:
        return self.again + self.length

    @property
    def queries(self) -> Int64Array:
        return np.concatenate([self.keys_K[: self.again], np.arange(self.start, self.start + self.length)])


@dataclasses.dataclass(frozen=True, slots=True)
class Rectangle:
    """Blocks that attend together; padding repeats place 0."""

    queries_GQ: Tensor
    keys_GK: Tensor
    mask_GQK: Tensor | Callable[[], Tensor] | None
    """For capped scores it is made each time, as the masks of a long row together are quadratic in its length. None:
    causal, and keys are the queries."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ragged:
    keys: Copies
    """Per segment, its ancestors' keys, then its own."""
    ends: Ends


def keys_of(segments: Segments, k: int) -> Int64Array:
    return segments.places(segments.path(k))


def ragged(segments: Segments, device: torch.device, *, first_keys: int = 0) -> Ragged:
    """Return all segments as one ragged batch, with ``first_keys`` shared extra keys at the array's start."""
    extra = np.arange(first_keys)
    keys = [np.concatenate((extra, keys_of(segments, k) + first_keys)) for k in range(len(segments.starts_K))]
    lengths_K = segments.before + segments.lengths_K + first_keys
    ends = [np.concatenate(([0], np.cumsum(lengths))).astype(np.int32) for lengths in (segments.lengths_K, lengths_K)]
    query_ends, key_ends = (torch.from_numpy(end).to(device) for end in ends)
    places = copies(np.concatenate(keys), first_keys + int(segments.lengths_K.sum()), device)
    return Ragged(places, Ends(query_ends, key_ends, int(segments.lengths_K.max()), int(lengths_K.max())))


def rectangles(
    segments: Segments, device: torch.device, pattern: Pattern = CAUSAL, *, masked: bool = False, capped: bool = False
) -> tuple[list[Rectangle], Tensor]:
    """Return the rectangles, and each token's place in their concatenated outputs.

    ``masked``: causal rectangles need a mask, too; ``capped``: for capped scores.
    """
    masked = masked or capped or pattern.kind != "causal"
    blocks = [piece for block in _blocks(segments) for piece in _cut(block, pattern, masked)]
    sees = _Sees(segments, pattern, device, masked=masked)
    laid_out: list[Rectangle] = []
    places_T = np.empty(int(segments.lengths_K.sum()), dtype=np.int64)
    before = 0
    for members in similar([(block.height, len(block.keys_K)) for block in blocks]):
        rectangle = _rectangle([blocks[k] for k in members], sees, capped=capped)
        height = rectangle.queries_GQ.shape[1]
        for g, k in enumerate(members):
            block, first = blocks[k], before + g * height + blocks[k].again
            places_T[block.start : block.start + block.length] = np.arange(first, first + block.length)
        laid_out.append(rectangle)
        before += rectangle.queries_GQ.numel()
    return laid_out, torch.from_numpy(places_T).to(device)


def coarse(segments: Segments) -> Segments:
    """Return the segments with each short tree as one."""
    roots_K = segments.roots
    tokens_K = (segments.ends - segments.starts_K)[roots_K]
    short_K = tokens_K <= SHORT_ROW_TOKENS
    keep_K = ~short_K | (segments.parents_K < 0)
    numbers_K = np.cumsum(keep_K) - 1
    return Segments(
        segments.starts_K[keep_K],
        np.where(short_K, tokens_K, segments.lengths_K)[keep_K],
        np.where(segments.parents_K < 0, -1, numbers_K[segments.parents_K])[keep_K],
    )


def similar(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Group indices of (queries, keys) sizes, largest first, for little padding."""
    order = sorted(range(len(sizes)), key=lambda k: (-sizes[k][1], -sizes[k][0]))
    runs: list[list[int]] = []
    height = width = pairs = 0
    for k in order:
        length, keys = sizes[k]
        taller = max(height, length)
        padded = (len(runs[-1]) + 1) * taller * width if runs else 0
        if runs and padded <= min(_PADDED * (pairs + length * keys) + SLACK_PAIRS, MASKED_PAIRS):
            runs[-1].append(k)
            height, pairs = taller, pairs + length * keys
        else:
            runs.append([k])
            height, width, pairs = length, keys, length * keys
    return runs


def _blocks(segments: Segments) -> list[Block]:
    merged = coarse(segments)
    return [
        Block(int(merged.starts_K[k]), int(merged.lengths_K[k]), keys_of(merged, k))
        for k in range(len(merged.starts_K))
    ]


def _cut(block: Block, pattern: Pattern, masked: bool) -> list[Block]:
    """Split ``block`` to fit a mask, each piece with its reachable keys."""
    earlier = len(block.keys_K) - block.length
    if not (masked or earlier) or block.length * len(block.keys_K) <= SHORT_ROW_TOKENS**2:
        return [block]
    if not masked and earlier <= block.length and block.length * len(block.keys_K) > MASKED_PAIRS:
        return [dataclasses.replace(block, again=earlier)]
    height = _height(len(block.keys_K), pattern)
    pieces = []
    for start in range(0, block.length, height):
        end = min(start + height, block.length)
        first = pattern.first_seen(earlier + start)
        pieces.append(Block(block.start + start, end - start, block.keys_K[first : earlier + end]))
    return pieces


def _height(keys: int, pattern: Pattern) -> int:
    if pattern.kind != "causal":
        keys = min(keys, 2 * max(pattern.size, _LOWEST))
        return int(np.clip(min(pattern.size, MASKED_PAIRS // keys), _LOWEST, _HIGHEST))
    return max(_LOWEST, MASKED_PAIRS // keys)


class _Sees:
    def __init__(self, segments: Segments, pattern: Pattern, device: torch.device, *, masked: bool) -> None:
        self.device = device
        self._pattern = pattern
        self._masked = masked
        self._until_T, self._position_T = (
            torch.from_numpy(each).to(device) for each in (segments.until, segments.positions)
        )

    def mask(self, queries_GQ: Tensor, keys_GK: Tensor) -> Tensor | None:
        """None for plain causal attention; −1 is padding, which as a query sees all."""
        if not self._masked and torch.equal(queries_GQ, keys_GK) and self._is_path(keys_GK):
            return None
        query, key, place = queries_GQ[:, :, None], keys_GK[:, None, :], queries_GQ.clamp(min=0)
        seen = (key >= 0) & (key <= query) & (query < self._until_T[keys_GK.clamp(min=0)][:, None, :])
        if self._pattern.kind != "causal":
            positions_GK = self._position_T[keys_GK.clamp(min=0)]
            seen = seen & self._pattern.sees(self._position_T[place][..., None], positions_GK[:, None, :])
        return seen | (query < 0)

    def _is_path(self, keys_GK: Tensor) -> bool:
        """Whether the last key sees all others of its block, so that each sees all before it."""
        last_G1 = keys_GK.amax(1, keepdim=True)
        return bool(((self._until_T[keys_GK.clamp(min=0)] > last_G1) | (keys_GK < 0)).all())


def _rectangle(blocks: Sequence[Block], sees: _Sees, *, capped: bool) -> Rectangle:
    height, width = max(block.height for block in blocks), max(len(block.keys_K) for block in blocks)
    queries_GQ = np.full((len(blocks), height), -1, dtype=np.int64)
    keys_GK = np.full((len(blocks), width), -1, dtype=np.int64)
    for g, block in enumerate(blocks):
        keys_GK[g, : len(block.keys_K)] = block.keys_K
        queries_GQ[g, : block.height] = block.queries
    queries, keys = torch.from_numpy(queries_GQ).to(sees.device), torch.from_numpy(keys_GK).to(sees.device)
    mask = functools.partial(sees.mask, queries, keys)
    return Rectangle(queries.clamp(min=0), keys.clamp(min=0), cast("Callable[[], Tensor]", mask) if capped else mask())
