"""Put the groups of a step into forward passes. Pure numpy; no model, no settings object.

A group is run as *one* row: its prompt once, then its completions side by side. Completions see the prompt and
themselves, not one another, and their positions start where the prompt ends, so the logprobs are those of separate
sequences while the prompt is computed once::

    tokens      12+34=  4 6  4 7  5        prompt, then each completion without its last token (it predicts nothing)
    segments    000000  1 1  2 2  3
    positions   012345  6 7  6 7  6

A row that would exceed the cap is split between completions. Rows go to ranks and micro-batches by longest first.
Every rank computes the same plan, and every rank has the same number of micro-batches (the last may be empty).

Shapes: ``B`` rows, ``T`` tokens a row (padded), ``N`` trained tokens of the micro-batch.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.messages import Float32Array, Int32Array, Sample

Int64Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A prompt and some of its completions, with one advantage each."""

    prompt_token_ids: Int32Array
    samples: tuple[Sample, ...]
    advantages: tuple[float, ...]

    @property
    def tokens(self) -> int:
        """How long the row is."""
        return len(self.prompt_token_ids) + sum(len(sample.token_ids) - 1 for sample in self.samples)


@dataclasses.dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass on one rank. ``rows_N, columns_N`` say which position predicts each trained token."""

    input_ids_BT: Int64Array
    position_ids_BT: Int64Array
    segments_BT: Int64Array
    """0 prompt, 1… completion, −1 padding."""
    rows_N: Int64Array
    columns_N: Int64Array
    targets_N: Int64Array
    behavior_logprobs_N: Float32Array
    advantages_N: Float32Array

    @property
    def tokens(self) -> int:
        """Computed positions, padding included."""
        return int(self.input_ids_BT.size)


def split_row(row: Row, max_tokens: int) -> list[Row]:
    """Return ``row`` in pieces of at most ``max_tokens``; a single completion that is longer stands alone."""
    pieces: list[Row] = []
    start, tokens = 0, len(row.prompt_token_ids)
    for index, sample in enumerate(row.samples):
        length = len(sample.token_ids) - 1
        if index > start and tokens + length > max_tokens:
            pieces.append(_piece(row, start, index))
            start, tokens = index, len(row.prompt_token_ids)
        tokens += length
    pieces.append(_piece(row, start, len(row.samples)))
    return pieces


def _piece(row: Row, start: int, end: int) -> Row:
    return Row(row.prompt_token_ids, row.samples[start:end], row.advantages[start:end])


def plan(rows: Sequence[Row], max_tokens: int, ranks: int) -> list[list[MicroBatch]]:
    """Return the micro-batches of each rank, equally many for each.

    Rows are given to the rank with the fewest tokens so far, longest first; on a rank, rows of similar length share a
    micro-batch as long as rows × longest ≤ ``max_tokens``.
    """
    pieces = [piece for row in rows for piece in split_row(row, max_tokens)]
    pieces.sort(key=lambda piece: -piece.tokens)  # stable: the order of the batch breaks ties
    shares: list[list[Row]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for piece in pieces:
        lightest = loads.index(min(loads))
        shares[lightest].append(piece)
        loads[lightest] += piece.tokens
    batches = [[micro_batch(chunk) for chunk in _chunks(share, max_tokens)] for share in shares]
    longest = max(len(share) for share in batches)
    return [share + [micro_batch([])] * (longest - len(share)) for share in batches]


def _chunks(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    chunks: list[list[Row]] = []
    for row in rows:  # longest first: the first row of a chunk sets its width
        if chunks and (len(chunks[-1]) + 1) * chunks[-1][0].tokens <= max_tokens:
            chunks[-1].append(row)
        else:
            chunks.append([row])
    return chunks


def micro_batch(rows: Sequence[Row]) -> MicroBatch:
    """Lay rows out as arrays; without rows, one position that trains nothing."""
    height, width = max(1, len(rows)), max((row.tokens for row in rows), default=1)
    input_ids = np.zeros((height, width), dtype=np.int64)
    positions = np.zeros((height, width), dtype=np.int64)
    segments = np.full((height, width), -1, dtype=np.int64)
    columns: list[npt.NDArray[np.int64]] = []
    for index, row in enumerate(rows):
        _lay_out(row, input_ids[index], positions[index], segments[index], columns)
    samples = [sample for row in rows for sample in row.samples]
    lengths = [len(sample.token_ids) for sample in samples]
    per_row = [sum(len(sample.token_ids) for sample in row.samples) for row in rows]
    advantages = np.array([advantage for row in rows for advantage in row.advantages], dtype=np.float32)
    return MicroBatch(
        input_ids_BT=input_ids,
        position_ids_BT=positions,
        segments_BT=segments,
        rows_N=np.repeat(np.arange(len(rows), dtype=np.int64), per_row),
        columns_N=_join(columns, np.int64),
        targets_N=_join([sample.token_ids for sample in samples], np.int64),
        behavior_logprobs_N=_join([sample.behavior_logprobs for sample in samples], np.float32),
        advantages_N=np.repeat(advantages, lengths),
    )


def _lay_out(
    row: Row, input_ids: Int64Array, positions: Int64Array, segments: Int64Array, columns: list[Int64Array]
) -> None:
    prompt = len(row.prompt_token_ids)
    input_ids[:prompt] = row.prompt_token_ids
    positions[:prompt] = np.arange(prompt)
    segments[:prompt] = 0
    start = prompt
    for number, sample in enumerate(row.samples, start=1):
        length = len(sample.token_ids) - 1
        end = start + length
        input_ids[start:end] = sample.token_ids[:-1]
        positions[start:end] = np.arange(prompt, prompt + length)
        segments[start:end] = number
        columns.append(np.concatenate(([prompt - 1], np.arange(start, end))))
        start = end


def _join(parts: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype=dtype)


def attention_mask(segments_BT: Int64Array) -> npt.NDArray[np.bool_]:
    """Return which position sees which, B × 1 × T × T: causal, within a completion and its prompt.

    Padding sees itself only, which keeps its softmax finite and touches nothing else.
    """
    width = segments_BT.shape[1]
    causal = np.tril(np.ones((width, width), dtype=np.bool_))
    same = segments_BT[:, :, None] == segments_BT[:, None, :]
    prompt = (segments_BT == 0)[:, None, :] & (segments_BT >= 0)[:, :, None]
    mask: npt.NDArray[np.bool_] = (causal & (same | prompt))[:, None, :, :]
    return mask
