"""Lag and staleness of samples.

A token's lag is the number of steps committed since its version's. Versions ascend within a sample, so the tokens over
``max_lag`` are its first ones: its *context*, which conditions the other tokens and is not trained::

    token_ids          41  9  3 17  2        max_lag 2 at step 10
    version_spans      [[0, 7], [3, 8]]      lags 3 3 3 2 2: stale
    context            3                     with ``mask``; 5, the whole sample, otherwise
"""

from collections.abc import Mapping, Sequence, Set
from typing import Literal

import numpy as np

from penstock.shared.bus.messages import Float32Array, PolicyVersion, RolloutGroup, Sample

Granularity = Literal["mask", "sample", "group"]
Steps = Mapping[PolicyVersion, int]
"""The committed step of each version; others count as the initial policy."""


def lag_steps(sample: Sample, step: int, steps_of_versions: Steps, context: int = 0) -> int:
    """Return the lag of a sample's oldest token after its first ``context`` ones."""
    spans = sample.version_spans.tolist()
    ends = [start for start, _ in spans[1:]] + [len(sample.token_ids)]
    return max(
        step - steps_of_versions.get(version, 0) for (_, version), end in zip(spans, ends, strict=True) if end > context
    )


def trained_lags(group: RolloutGroup, step: int, steps_of_versions: Steps, contexts: Sequence[int] = ()) -> list[int]:
    """Return the lag of each sample that has trained tokens."""
    pairs = zip(group.samples, contexts or (0,) * len(group.samples), strict=True)
    return [
        lag_steps(sample, step, steps_of_versions, context)
        for sample, context in pairs
        if context < len(sample.token_ids)
    ]


def token_lags(sample: Sample, lags: Mapping[PolicyVersion, int], context: int = 0) -> Float32Array:
    """Return the lag of each token after the first ``context`` ones, given those of versions."""
    starts_K, versions_K = sample.version_spans.T
    lags_K = np.array([lags[PolicyVersion(version)] for version in versions_K.tolist()], dtype=np.float32)
    tokens: Float32Array = np.repeat(lags_K, np.diff(np.append(starts_K, len(sample.token_ids))))[context:]
    return tokens


def is_fenced(group: RolloutGroup, revoked: Set[PolicyVersion]) -> bool:
    """Whether a token is of a revoked version."""
    return bool(revoked) and not revoked.isdisjoint(group.versions)


def find_contexts(
    group: RolloutGroup, step: int, steps_of_versions: Steps, max_lag: int, how: Granularity
) -> tuple[int, ...]:
    """Return how many first tokens of each sample are context.

    ``mask``: those up to its last one over ``max_lag``; ``sample``: all tokens of a stale sample; ``group``: all tokens
    of a group with a stale sample.
    """
    contexts = [_context(sample, step, steps_of_versions, max_lag) for sample in group.samples]
    if how != "mask":
        whole = how == "group" and any(contexts)
        pairs = zip(group.samples, contexts, strict=True)
        contexts = [len(sample.token_ids) if whole or context else 0 for sample, context in pairs]
    return tuple(contexts)


def without_long(group: RolloutGroup, contexts: Sequence[int], most_tokens: int) -> tuple[int, ...]:
    """Return the contexts with all tokens of each sample that is, with its prompt, longer than ``most_tokens``."""
    long = are_long(group, most_tokens)
    pairs = zip(group.samples, contexts, long, strict=True)
    return tuple(len(sample.token_ids) if is_long else context for sample, context, is_long in pairs)


def are_long(group: RolloutGroup, most_tokens: int) -> list[bool]:
    """Say of each sample whether it is, with its prompt, longer than ``most_tokens``, and fits no forward pass."""
    return [len(group.prompt_token_ids) + len(sample.token_ids) > most_tokens for sample in group.samples]


def _context(sample: Sample, step: int, steps_of_versions: Steps, max_lag: int) -> int:
    end = len(sample.token_ids)
    for start, version in reversed(sample.version_spans.tolist()):
        if step - steps_of_versions.get(version, 0) > max_lag:
            return end
        end = start
    return 0
