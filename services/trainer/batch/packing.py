"""Pack the groups of a step into forward passes, in numpy.

A :class:`PackedRow` is a group's prompt, then its completions, which see the prompt and themselves, or trees (``trie``);
logprobs equal those of separate sequences. A micro-batch concatenates rows without padding::

    tokens      12+34=  4 6  4 7  5    98-1=  7        each prompt, then each completion without its last token
    segments    0       1    2    3    4      5
    positions   012345  6 7  6 7  6    01234  5
    sees also           0    0    0           4        a segment sees itself, causally, and all of its prompt

Where completions are short, equal beginnings of them are computed once, too (``trie``). For some models
(``trainer.packing``) rows repeat the prompt for each completion.

Rows go to ranks and micro-batches by ``assignment``.

Shapes: ``B`` 1, ``T`` tokens of the micro-batch, ``K`` segments, ``N`` trained tokens, ``S`` samples.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.services.trainer.batch.segments import Int64Array, Segments, join
from penstock.services.trainer.batch.staleness import trained_tokens
from penstock.services.trainer.batch.trie import RowLayout, lay_out, merges
from penstock.shared.bus.messages import Float32Array, Int32Array, Sample
from penstock.shared.model.flops import ModelSizes, forward_flops

TOKENS_ALONE = ModelSizes()


@dataclasses.dataclass(frozen=True)
class PackedRow:
    """A prompt and some of its completions, with their places in the batch.

    The ``contexts`` oldest tokens of each sample are not trained; empty: all that were sampled are.
    """

    prompt_token_ids: Int32Array
    samples: tuple[Sample, ...]
    places: tuple[int, ...]
    temperature: float = 1.0
    shares_prompt: bool = True
    contexts: tuple[int, ...] = ()
    _flops: dict[ModelSizes, float] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def prompts(self) -> int:
        """How often the prompt is computed."""
        return 1 if self.shares_prompt else max(1, len(self.samples))

    @functools.cached_property
    def trained(self) -> list[npt.NDArray[np.bool_]]:
        """Which tokens of each sample are trained."""
        pairs = zip(self.samples, self.contexts or (0,) * len(self.samples), strict=True)
        return [trained_tokens(sample, context) for sample, context in pairs]

    @functools.cached_property
    def layout(self) -> RowLayout:
        """With the prompt once."""
        return lay_out(self.prompt_token_ids, self.samples, self.trained, merged=self.is_merged)

    @functools.cached_property
    def is_merged(self) -> bool:
        """Whether equal beginnings of its completions are computed once."""
        return self.shares_prompt and merges(self.prompt_token_ids, self.samples)

    @functools.cached_property
    def _has_trees(self) -> bool:
        return self.is_merged or any(len(sample.segments) for sample in self.samples)

    @functools.cached_property
    def tokens(self) -> int:
        """Row length; without shared prompts, with every path by itself."""
        if self._has_trees and not self.shares_prompt:
            segments = [row.layout.segments for row in self.unshared()]
            return sum(len(of.places(path)) for of in segments for path in of.paths)
        if self._has_trees:
            return len(self.layout.input_ids_T)
        return self.prompts * len(self.prompt_token_ids) + sum(len(sample.token_ids) - 1 for sample in self.samples)

    @functools.cached_property
    def size(self) -> int:
        """What it takes of a micro-batch's tokens: its length, or the trained tokens, of which a merged row may have more."""
        return max(self.tokens, self._predicted) if self.is_merged else self.tokens

    @property
    def _predicted(self) -> int:
        return sum(sample.sampled_tokens for sample in self.samples) - sum(self.contexts)

    @property
    def visible_pairs(self) -> int:
        """(Position, visible position) pairs, itself included."""
        return self.pairs_within(self.tokens)

    def pairs_within(self, window: int) -> int:
        """Return :attr:`visible_pairs` with attention limited to ``window`` tokens."""
        if self._has_trees:
            segments = [row.layout.segments for row in self.unshared()]
            starts = [start for of in segments for start in of.before.tolist()]
            lengths = [length for of in segments for length in of.lengths_K.tolist()]
            both = zip(starts, lengths, strict=True)
            return sum(_causal_pairs(start + length, window) - _causal_pairs(start, window) for start, length in both)
        prompt = len(self.prompt_token_ids)
        ends = [prompt + len(sample.token_ids) - 1 for sample in self.samples]
        before = _causal_pairs(prompt, window)
        return self.prompts * before + sum(_causal_pairs(end, window) - before for end in ends)

    def unshared(self) -> list["PackedRow"]:
        """Return rows that each compute their prompt once."""
        if self.shares_prompt or len(self.samples) < 2:
            return [self]
        return [part(self, index, index + 1) for index in range(len(self.samples))]

    def flops(self, sizes: ModelSizes) -> float:
        """Operations of its forward pass."""
        if sizes not in self._flops:
            windowed = [self.pairs_within(window) for window, _ in sizes.windows]
            self._flops[sizes] = forward_flops(self.tokens, self.visible_pairs, self._predicted, sizes, windowed)
        return self._flops[sizes]


def _causal_pairs(tokens: int, window: int) -> int:
    inside = min(tokens, window)
    return inside * (inside + 1) // 2 + (tokens - inside) * window


@dataclasses.dataclass(frozen=True, slots=True)
class Support:
    """The tokens that could be drawn at each position (``Sample.support_sizes``), padded by one of their row."""

    ids_NK: Int32Array
    sizes_N: Int32Array

    def at(self, places_N: Int64Array) -> "Support":
        """Return those of some positions."""
        return Support(self.ids_NK[places_N], self.sizes_N[places_N])


@dataclasses.dataclass(frozen=True, slots=True)
class TeacherTokens:
    """The teacher's most probable tokens at each position, and their logprobs.

    Positions of demonstrations have the first tokens of the vocabulary, which no loss reads.
    """

    ids_NK: Int32Array
    logprobs_NK: Float32Array

    def at(self, places_N: Int64Array) -> "TeacherTokens":
        """Return those of some positions."""
        return TeacherTokens(self.ids_NK[places_N], self.logprobs_NK[places_N])


@dataclasses.dataclass(frozen=True, slots=True)
class RoutedSample:
    """The claim of a sample's routes (``Sample.routes``), and the place of each of its positions in the row, or −1: of prompt
    and completion but the last token, or of the tokens from which those of an episode's turns were drawn.
    """

    claim: bytes
    """Empty: it has no routes, and no positions here."""
    columns_P: Int64Array
    drawn: int
    """Tokens of the completion, or of all turns."""
    turns: tuple[int, ...] = ()
    """Tokens of each turn; empty: a completion."""

    @property
    def lengths(self) -> tuple[int, int, tuple[int, ...]]:
        """What the size of its payload depends on."""
        return len(self.columns_P), self.drawn, self.turns


@dataclasses.dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass on one rank. ``columns_N`` predict the trained tokens, in sample order."""

    input_ids_BT: Int64Array
    position_ids_BT: Int64Array
    segments: Segments
    columns_N: Int64Array
    targets_N: Int64Array
    behavior_logprobs_N: Float32Array
    temperatures_N: Float32Array
    lengths_S: Int64Array
    """Trained tokens of each sample."""
    places_S: Int64Array
    """The place of each sample in the batch."""
    trained_S: tuple[npt.NDArray[np.bool_], ...] = ()
    """Which tokens of each sample are trained."""
    flops: float = 0.0
    support: Support | None = None
    """None: every token could be drawn."""
    teacher: TeacherTokens | None = None
    """None: no sample has them."""
    routed: tuple[RoutedSample, ...] = ()
    merged: int = 0
    """Rows in which equal beginnings of completions are computed once."""
    ranks: int = 1
    """Ranks that hold equal parts of the row: tokens are this rank's, ``segments`` those of all."""
    shard: "Shard | None" = None
    """None: this rank computes all of it."""

    @property
    def computed(self) -> "MicroBatch":
        """What this rank computes of it."""
        return self if self.shard is None else self.shard.part

    @property
    def tokens(self) -> int:
        """Positions that this rank computes."""
        return int(self.computed.input_ids_BT.size)


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of a micro-batch that several ranks compute together (``shards``)."""

    part: MicroBatch
    """Its tokens, and the trained tokens that they predict."""
    places_N: Int64Array
    """Places of these among the trained tokens of all ranks."""
    trained: int
    """Trained tokens of all ranks."""


def split_row(row: PackedRow, max_tokens: int) -> list[PackedRow]:
    """Return pieces of at most ``max_tokens``, except for single longer completions."""
    if row.size <= max_tokens:
        return [row]
    pieces: list[PackedRow] = []
    start = 0
    for index in range(1, len(row.samples)):
        if part(row, start, index + 1).size > max_tokens:
            pieces.append(part(row, start, index))
            start = index
    pieces.append(part(row, start, len(row.samples)))
    return pieces


def part(row: PackedRow, start: int, end: int) -> PackedRow:
    """Return ``row`` with samples ``start`` … ``end − 1`` only."""
    return only(row, range(start, end))


def only(row: PackedRow, kept: Sequence[int]) -> PackedRow:
    """Return ``row`` with the samples of some indices only."""
    contexts = tuple(row.contexts[index] for index in kept) if row.contexts else ()
    samples, places = tuple(row.samples[index] for index in kept), tuple(row.places[index] for index in kept)
    return dataclasses.replace(row, samples=samples, places=places, contexts=contexts)


def micro_batch(rows: Sequence[PackedRow], sizes: ModelSizes = TOKENS_ALONE) -> MicroBatch:
    """Concatenate rows; without rows, train nothing."""
    single = [unshared for row in rows for unshared in row.unshared()]
    segments = join([row.layout.segments for row in single])
    input_ids = _join([row.layout.input_ids_T for row in single], np.int64)
    starts = np.cumsum([0, *(len(row.layout.input_ids_T) for row in single)])
    columns = [own + start for row, start in zip(single, starts, strict=False) for own in row.layout.columns_S]
    samples = [sample for row in rows for sample in row.samples]
    trained_S = tuple(trained for row in rows for trained in row.trained)
    lengths = [int(trained.sum()) for trained in trained_S]
    temperatures = np.array([row.temperature for row in rows for _ in row.samples], np.float32)
    return MicroBatch(
        input_ids_BT=(input_ids if len(input_ids) else np.zeros(1, np.int64))[None],
        position_ids_BT=segments.positions[None],
        segments=segments,
        columns_N=_join(columns, np.int64),
        targets_N=_trained([sample.token_ids for sample in samples], trained_S, np.int64),
        behavior_logprobs_N=_trained([sample.behavior_logprobs for sample in samples], trained_S, np.float32),
        temperatures_N=np.repeat(temperatures, lengths),
        lengths_S=np.array(lengths, dtype=np.int64),
        places_S=np.array([place for row in rows for place in row.places], dtype=np.int64),
        trained_S=trained_S,
        flops=sum(row.flops(sizes) for row in rows),
        support=_support(samples, trained_S),
        teacher=_teacher(samples, trained_S),
        routed=tuple(each for row, start in zip(single, starts, strict=False) for each in _routed(row, int(start))),
        merged=sum(row.is_merged for row in rows),
    )


def _routed(row: PackedRow, start: int) -> list[RoutedSample]:
    """Return where the samples of a row at ``start`` may have routes."""
    prompt, routed = np.arange(len(row.prompt_token_ids)), []
    for sample, before in zip(row.samples, row.layout.before_S, strict=True):
        lengths = np.diff(np.append(sample.segments[:, 0], len(sample.token_ids)))
        turns = tuple(lengths[sample.segments[:, 2] == 1].tolist())
        places = prompt[:0]
        if sample.routes:
            places = before[sample.sampled] if turns else np.concatenate([prompt, before[1:]])
        columns = np.where(places < 0, -1, places + start)
        routed.append(RoutedSample(sample.routes, columns, sample.sampled_tokens, turns))
    return routed


def _support(samples: Sequence[Sample], trained_S: Sequence[npt.NDArray[np.bool_]]) -> Support | None:
    """Return the supports of the samples' trained tokens, or None without restrictions."""
    if not any(len(sample.support_sizes) for sample in samples):
        return None
    whole = [np.zeros(len(sample.token_ids), np.int32) for sample in samples]
    sizes_N = _join(
        [s.support_sizes if len(s.support_sizes) else w for s, w in zip(samples, whole, strict=True)], np.int32
    )
    counts_N = np.abs(sizes_N)
    ids_NK = np.zeros((len(sizes_N), max(1, int(counts_N.max()))), dtype=np.int32)
    inside_NK = np.arange(ids_NK.shape[1]) < counts_N[:, None]
    ids_NK[inside_NK] = _join([sample.support_ids for sample in samples], np.int32)
    trained_N = _join(trained_S, np.bool_)
    return Support(np.where(inside_NK, ids_NK, ids_NK[:, :1])[trained_N], sizes_N[trained_N])


def _teacher(samples: Sequence[Sample], trained_S: Sequence[npt.NDArray[np.bool_]]) -> TeacherTokens | None:
    """Return the teacher's tokens at the samples' trained tokens; which samples must have them, ``add_teacher`` checks."""
    numbers = {sample.teacher_top_ids.shape[1] for sample in samples if sample.teacher_top_ids is not None}
    if len(numbers) != 1:
        return None
    first_K = np.arange(numbers.pop(), dtype=np.int32)
    ids, logprobs = [], []
    for sample in samples:
        own_ids, own = sample.teacher_top_ids, sample.teacher_top_logprobs
        shape = (len(sample.token_ids), len(first_K))
        ids.append(np.broadcast_to(first_K, shape) if own_ids is None else own_ids)
        logprobs.append(np.zeros(shape, np.float32) if own is None else own)
    return TeacherTokens(_trained(ids, trained_S, np.int32), _trained(logprobs, trained_S, np.float32))


def _trained(
    parts: Sequence[npt.NDArray[Any]], trained_S: Sequence[npt.NDArray[np.bool_]], dtype: type[np.generic]
) -> npt.NDArray[Any]:
    return _join([part[trained] for part, trained in zip(parts, trained_S, strict=True)], dtype)


def _join(parts: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype=dtype)
