"""Branches of an episode's tree: the paths from its first segments to those that nothing continues."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from penstock.shared.bus.messages import Int32Array, Sample


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """The part of a branch whose tokens are to be read: no earlier branch has them.

    ``before`` is context, ``places`` are those of the read tokens in the sample: from the first sampled one to the last.
    """

    before: Int32Array
    places: Int32Array


def branches(sample: Sample) -> Iterator[Branch]:
    """Yield what is to be read, so that every sampled token is once; a completion is one branch."""
    sampled, known = sample.sampled, 0
    for path in _paths(sample):
        own = path[(path >= known) & sampled[path]]
        known = max(known, int(path[-1]) + 1)
        if len(own):
            first, last = np.searchsorted(path, (own[0], own[-1]))
            yield Branch(path[:first], path[first : last + 1])


def _paths(sample: Sample) -> Iterator[Int32Array]:
    """Yield the places of each branch's tokens, which ascend."""
    whole = np.arange(len(sample.token_ids), dtype=np.int32)
    if not len(sample.segments):
        yield whole
        return
    starts, parents, _ = sample.segments.T.tolist()
    ends, continued = [*starts[1:], len(whole)], set(parents)
    for leaf in range(len(starts)):
        if leaf not in continued:
            path, segment = list[Int32Array](), leaf
            while segment >= 0:
                path.append(whole[starts[segment] : ends[segment]])
                segment = parents[segment]
            yield np.concatenate(path[::-1])


def longest_branch(sample: Sample) -> Int32Array:
    """Return the places of the tokens of its longest branch; all of a completion."""
    return max(_paths(sample), key=len)


def is_branched(sample: Sample) -> bool:
    """Whether it has more than one branch."""
    return bool((sample.segments[:, 1] != np.arange(-1, len(sample.segments) - 1)).any())
