"""Branches of an episode's tree: the paths from its first segments to those that nothing continues."""

import numpy as np

from shared.bus.messages import Int32Array, Sample


def longest_branch(sample: Sample) -> Int32Array:
    """Return the places of the tokens of its longest branch; all of a completion."""
    if not len(sample.segments):
        return np.arange(len(sample.token_ids), dtype=np.int32)
    rows: list[list[int]] = sample.segments.tolist()
    ends = [*(start for start, _, _ in rows[1:]), len(sample.token_ids)]
    tokens = [0] * len(rows)
    for number, ((start, parent, _), end) in enumerate(zip(rows, ends, strict=True)):
        tokens[number] = end - start + (tokens[parent] if parent >= 0 else 0)
    segment, parts = int(np.argmax(tokens)), list[Int32Array]()
    while segment >= 0:
        parts.append(np.arange(rows[segment][0], ends[segment], dtype=np.int32))
        segment = rows[segment][1]
    return np.concatenate(parts[::-1])


def is_branched(sample: Sample) -> bool:
    """Whether it has more than one branch."""
    return bool((sample.segments[:, 1] != np.arange(-1, len(sample.segments) - 1)).any())
