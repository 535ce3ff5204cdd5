"""Cut a micro-batch into equal parts, one for each rank of a group (``trainer.sequence_parallel``).

::

    row       P P P P a a a b b b +      a prompt, two completions; padding (+) is a sequence of its own
    rank 0    P P P P a a                the loss of all samples
    rank 1    a b b b + +                no samples: their logprobs go to rank 0, and their gradients come from there

So each sample counts once in sums over ranks. All ranks have the segments of the whole row, for attention.
"""

import dataclasses

import numpy as np

from penstock.services.trainer.batch.packing import MicroBatch, RoutedSample, Shard, micro_batch
from penstock.services.trainer.batch.segments import Int64Array, Segments, join


def split(whole: MicroBatch, ranks: int) -> list[MicroBatch]:
    """Return what each of ``ranks`` ranks computes of ``whole``, which has the samples on the first of them."""
    padding = -whole.tokens % ranks
    padded = [whole.segments, Segments(*(np.array([number]) for number in (0, padding, -1)))]
    segments = join(padded) if padding else whole.segments
    ids_BT = np.pad(whole.input_ids_BT, ((0, 0), (0, padding)))
    return [_part(whole, ids_BT, segments, rank, ranks) for rank in range(ranks)]


def _part(whole: MicroBatch, ids_BT: Int64Array, segments: Segments, rank: int, ranks: int) -> MicroBatch:
    tokens = ids_BT.size // ranks
    own = slice(rank * tokens, (rank + 1) * tokens)
    places_N = np.flatnonzero(whole.columns_N // tokens == rank)
    part = dataclasses.replace(
        whole,
        input_ids_BT=ids_BT[:, own],
        position_ids_BT=segments.positions[None, own],
        segments=segments,
        columns_N=whole.columns_N[places_N] - rank * tokens,
        targets_N=whole.targets_N[places_N],
        behavior_logprobs_N=whole.behavior_logprobs_N[places_N],
        temperatures_N=whole.temperatures_N[places_N],
        support=None if whole.support is None else whole.support.at(places_N),
        teacher=None if whole.teacher is None else whole.teacher.at(places_N),
        routed=tuple(_own(routed, own) for routed in whole.routed),
        ranks=ranks,
    )
    shard = Shard(part, places_N, len(whole.targets_N))
    return dataclasses.replace(whole if rank == 0 else micro_batch([]), shard=shard, flops=whole.flops / ranks)


def _own(sample: RoutedSample, own: slice) -> RoutedSample:
    """Return ``sample`` with its places among the tokens ``own`` of the row."""
    columns_P = sample.columns_P
    is_own_P = (columns_P >= own.start) & (columns_P < own.stop)
    return dataclasses.replace(sample, columns_P=np.where(is_own_P, columns_P - own.start, -1))
