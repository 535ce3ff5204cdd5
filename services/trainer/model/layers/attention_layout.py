"""Which tokens of a packed row attend to which: blocks of queries with their keys, and rectangles of similar blocks.

A segment attends to its prompt and, causally, to itself (``packing``). A :class:`Pattern` restricts that further by the distance
between positions in the *sequence*, prompt and completion together, wherever the two are in the row. Knows no model, no attention
function and no settings object.

A block that needs a mask is cut into pieces of queries, each with only those keys that it can reach, so that neither masks nor
scores ever have the row's size squared.

Shapes: ``G`` blocks of a rectangle, ``T`` tokens of the row, ``K`` segments or keys, ``Q`` queries.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from services.trainer.batch.packing import Int64Array, Segments
from services.trainer.model.layers.gather import Copies, copies

SHORT_ROW_TOKENS = 128
"""Rows up to this length attend as a whole: many tiny segments cost more than the pairs they need not compute."""
SLACK_PAIRS = 1 << 16
"""Pairs of a query and a key that a rectangle may waste on padding, besides ``_PADDED`` times what it needs."""
MASKED_PAIRS = 1 << 22
"""Most pairs of a rectangle with a mask; a block of ``_LOWEST`` queries may have more."""
_PADDED = 1.3
_LOWEST, _HIGHEST = 128, 2048


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """What a token sees of the earlier tokens of its sequence.

    ``causal``: all of them. ``window``: itself and the ``size − 1`` before it. ``chunk``: those whose position divided by ``size``
    is the same.
    """

    kind: Literal["causal", "window", "chunk"] = "causal"
    size: int = 0

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether a token at position ``query`` sees one at position ``key``, elementwise with broadcasting."""
        seen = key <= query
        if self.kind == "window":
            return seen & (key > query - self.size)
        if self.kind == "chunk":
            return seen & (key // self.size == query // self.size)
        return seen

    def first_seen(self, position: int) -> int:
        """Return the first position that a token at ``position`` sees."""
        if self.kind == "window":
            return max(0, position - self.size + 1)
        return position - position % self.size if self.kind == "chunk" else 0


CAUSAL = Pattern()


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Queries side by side in the row, and the places of the keys that at least one of them may see."""

    start: int
    length: int
    keys_K: Int64Array


@dataclasses.dataclass(frozen=True, slots=True)
class Rectangle:
    """Blocks that attend together. Places are those of the row; what pads a block repeats place 0."""

    queries_GQ: Tensor
    keys_GK: Tensor
    mask_GQK: Tensor | None
    """What a query sees; None: keys are the queries, and attention is causal."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ragged:
    """Segments one after another, of different lengths."""

    keys: Copies
    """Places of all keys, segment after segment: its prompt's, then its own."""
    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int


def keys_of(segments: Segments, k: int) -> Int64Array:
    """Return the places that segment ``k`` sees, its prompt first."""
    prompt, start = segments.prompt_starts_K[k], segments.starts_K[k]
    return np.concatenate(
        (np.arange(prompt, prompt + segments.prompt_lengths_K[k]), np.arange(start, start + segments.lengths_K[k]))
    )


def positions(segments: Segments, device: torch.device) -> Tensor:
    """Return each token's position in its sequence (T): a completion's continue its prompt's."""
    offsets_T = np.repeat(segments.prompt_lengths_K - segments.starts_K, segments.lengths_K)
    return torch.from_numpy(np.arange(len(offsets_T)) + offsets_T).to(device)


def ragged(segments: Segments, device: torch.device, *, first_keys: int = 0) -> Ragged:
    """Return all segments as one ragged batch.

    Args:
        segments: of the micro-batch.
        device: where the places go.
        first_keys: extra keys, at the start of the keys' array, that every segment has before its own.
    """
    extra = np.arange(first_keys)
    keys = [np.concatenate((extra, keys_of(segments, k) + first_keys)) for k in range(len(segments.starts_K))]
    lengths_K = segments.prompt_lengths_K + segments.lengths_K + first_keys
    ends = [np.concatenate(([0], np.cumsum(lengths))).astype(np.int32) for lengths in (segments.lengths_K, lengths_K)]
    query_ends, key_ends = (torch.from_numpy(end).to(device) for end in ends)
    places = copies(np.concatenate(keys), first_keys + int(segments.lengths_K.sum()), device)
    return Ragged(places, query_ends, key_ends, int(segments.lengths_K.max()), int(lengths_K.max()))


def rectangles(
    segments: Segments, device: torch.device, pattern: Pattern = CAUSAL, *, masked: bool = False
) -> tuple[list[Rectangle], Tensor]:
    """Return the rectangles, and the place of each token of the row in their outputs laid end to end.

    Args:
        segments: of the micro-batch.
        device: where the places go.
        pattern: what a token sees of its sequence.
        masked: whether every rectangle needs a mask, causal ones included.
    """
    masked = masked or pattern.kind != "causal"
    blocks = [piece for block in _blocks(segments) for piece in _cut(block, segments, pattern, masked)]
    sees = _Sees(segments, pattern, device, masked=masked)
    found: list[Rectangle] = []
    places_T = np.empty(int(segments.lengths_K.sum()), dtype=np.int64)
    before = 0
    for members in similar([(block.length, len(block.keys_K)) for block in blocks]):
        rectangle = _rectangle([blocks[k] for k in members], sees)
        height = rectangle.queries_GQ.shape[1]
        for g, k in enumerate(members):
            places_T[blocks[k].start : blocks[k].start + blocks[k].length] = (
                np.arange(blocks[k].length) + before + g * height
            )
        found.append(rectangle)
        before += rectangle.queries_GQ.numel()
    return found, torch.from_numpy(places_T).to(device)


def coarse(segments: Segments) -> Segments:
    """Return ``segments`` with those of a short row as one, which sees nothing beside itself."""
    ids_K = segments.prompt_starts_K
    tokens_K = np.bincount(ids_K, weights=segments.lengths_K)[ids_K].astype(np.int64)
    short_K = tokens_K <= SHORT_ROW_TOKENS
    keep_K = ~short_K | (segments.starts_K == ids_K)
    return Segments(
        segments.starts_K[keep_K],
        np.where(short_K, tokens_K, segments.lengths_K)[keep_K],
        ids_K[keep_K],
        np.where(short_K, 0, segments.prompt_lengths_K)[keep_K],
    )


def similar(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the numbers of blocks of these (queries, keys), largest first, in runs that waste little when padded to their largest."""
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


def _cut(block: Block, segments: Segments, pattern: Pattern, masked: bool) -> list[Block]:
    """Return ``block`` in pieces small enough for a mask; each with only the keys that ``pattern`` lets it reach."""
    earlier = len(block.keys_K) - block.length
    if not (masked or earlier) or block.length * len(block.keys_K) <= SHORT_ROW_TOKENS**2:
        return [block]
    height = _height(len(block.keys_K), pattern)
    pieces = []
    for start in range(0, block.length, height):
        end = min(start + height, block.length)
        first = pattern.first_seen(earlier + start)
        pieces.append(Block(block.start + start, end - start, block.keys_K[first : earlier + end]))
    return pieces


def _height(keys: int, pattern: Pattern) -> int:
    """Return how many queries a piece has: about as many as its pattern reaches, and no more than its mask may have pairs for."""
    if pattern.kind != "causal":
        keys = min(keys, 2 * max(pattern.size, _LOWEST))
        return int(np.clip(min(pattern.size, MASKED_PAIRS // keys), _LOWEST, _HIGHEST))
    return max(_LOWEST, MASKED_PAIRS // keys)


class _Sees:
    """What each place of the row sees: its prompt, and its segment up to itself, as far as the pattern reaches."""

    def __init__(self, segments: Segments, pattern: Pattern, device: torch.device, *, masked: bool) -> None:
        ends_K = segments.prompt_starts_K + segments.prompt_lengths_K
        per_token = [
            np.repeat(found, segments.lengths_K) for found in (segments.starts_K, segments.prompt_starts_K, ends_K)
        ]
        self.device = device
        self._pattern = pattern
        self._masked = masked
        self._start_T, self._prompt_T, self._prompt_end_T = (torch.from_numpy(found).to(device) for found in per_token)
        self._position_T = positions(segments, device)

    def mask(self, queries_GQ: Tensor, keys_GK: Tensor) -> Tensor | None:
        """Return what is seen; −1 is padding, which as a query sees all. None where attention is causal and needs no mask."""
        query, key = queries_GQ[:, :, None], keys_GK[:, None, :]
        place = queries_GQ.clamp(min=0)
        start, prompt, end = (t[place][..., None] for t in (self._start_T, self._prompt_T, self._prompt_end_T))
        plain = queries_GQ.shape == keys_GK.shape and bool(((start == keys_GK[:, :1, None]) | (query < 0)).all())
        if plain and not self._masked:
            return None
        own = (key >= start) & (key <= query)
        seen = own | ((key >= prompt) & (key < end))
        if self._pattern.kind != "causal":
            positions_GK = self._position_T[keys_GK.clamp(min=0)]
            seen = seen & self._pattern.sees(self._position_T[place][..., None], positions_GK[:, None, :])
        return seen | (query < 0)


def _rectangle(blocks: Sequence[Block], sees: _Sees) -> Rectangle:
    height, width = max(block.length for block in blocks), max(len(block.keys_K) for block in blocks)
    queries_GQ = np.full((len(blocks), height), -1, dtype=np.int64)
    keys_GK = np.full((len(blocks), width), -1, dtype=np.int64)
    for g, block in enumerate(blocks):
        keys_GK[g, : len(block.keys_K)] = block.keys_K
        queries_GQ[g, : block.length] = np.arange(block.start, block.start + block.length)
    queries, keys = torch.from_numpy(queries_GQ).to(sees.device), torch.from_numpy(keys_GK).to(sees.device)
    return Rectangle(queries.clamp(min=0), keys.clamp(min=0), sees.mask(queries, keys))
