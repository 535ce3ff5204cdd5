"""Lag and staleness of samples.

A token's lag is the number of steps committed since its version's. The tokens over ``max_lag`` are a sample's oldest
ones: its *context*, which conditions the other tokens and is not trained. Versions ascend within a completion, so they are
its first ones; given tokens of a tree are never trained, and count in no context::

    token_ids          41  9  3 17  2        max_lag 2 at step 10
    version_spans      [[0, 7], [3, 8]]      lags 3 3 3 2 2: stale
    context            3                     with ``mask``; 5, the whole sample, otherwise
"""

from collections.abc import Mapping, Sequence, Set
from typing import Literal

import numpy as np
import numpy.typing as npt

from penstock.shared.bus.messages import Float32Array, PolicyVersion, RolloutGroup, Sample
from penstock.shared.errors import MessageError
from penstock.shared.settings.rollout import MOST_KEPT

_MOST_DRAWN = 16 * MOST_KEPT
"""Most tokens that could be drawn at a position, ties included: of a forward pass, every position takes as much memory."""
Granularity = Literal["mask", "sample", "group"]
Steps = Mapping[PolicyVersion, int]
"""The committed step of each version; others count as the initial policy."""


def trained_tokens(sample: Sample, context: int = 0) -> npt.NDArray[np.bool_]:
    """Return which tokens are trained (T): those sampled, but the ``context`` oldest of them."""
    trained = sample.sampled
    if context and not len(sample.segments):
        trained[:context] = False
    elif context:
        places = np.flatnonzero(trained)
        trained[places[np.argsort(sample.token_versions[places], kind="stable")[:context]]] = False
    return trained


def lag_steps(sample: Sample, step: int, steps_of_versions: Steps, context: int = 0) -> int:
    """Return the lag of a sample's oldest token that is trained."""
    versions = sample.versions
    if context:
        versions = frozenset(map(PolicyVersion, sample.token_versions[trained_tokens(sample, context)].tolist()))
    return max(step - steps_of_versions.get(version, 0) for version in versions)


def trained_lags(group: RolloutGroup, step: int, steps_of_versions: Steps, contexts: Sequence[int] = ()) -> list[int]:
    """Return the lag of each sample that has trained tokens."""
    pairs = zip(group.samples, contexts or (0,) * len(group.samples), strict=True)
    return [
        lag_steps(sample, step, steps_of_versions, context)
        for sample, context in pairs
        if context < sample.sampled_tokens
    ]


def token_lags(sample: Sample, lags: Mapping[PolicyVersion, int], context: int = 0) -> Float32Array:
    """Return the lag of each trained token, given those of versions."""
    if len(sample.version_spans) == 1 and not len(sample.segments):
        lag = lags[PolicyVersion(int(sample.version_spans[0, 1]))]
        return np.full(len(sample.token_ids) - min(context, len(sample.token_ids)), lag, dtype=np.float32)
    versions, places = np.unique(sample.token_versions[trained_tokens(sample, context)], return_inverse=True)
    return np.array([lags[PolicyVersion(version)] for version in versions.tolist()], dtype=np.float32)[places]


def is_fenced(group: RolloutGroup, revoked: Set[PolicyVersion]) -> bool:
    """Whether a token is of a revoked version."""
    return bool(revoked) and not revoked.isdisjoint(group.versions)


def find_contexts(
    group: RolloutGroup, step: int, steps_of_versions: Steps, max_lag: int, how: Granularity
) -> tuple[int, ...]:
    """Return how many of each sample's oldest tokens are context.

    ``mask``: those up to its last one over ``max_lag``; ``sample``: all tokens of a stale sample; ``group``: all tokens
    of a group with a stale sample.
    """
    contexts = [_context(sample, step, steps_of_versions, max_lag) for sample in group.samples]
    if how != "mask":
        whole = how == "group" and any(contexts)
        pairs = zip(group.samples, contexts, strict=True)
        contexts = [sample.sampled_tokens if whole or context else 0 for sample, context in pairs]
    return tuple(contexts)


def without_long(group: RolloutGroup, contexts: Sequence[int], most_tokens: int) -> tuple[int, ...]:
    """Return the contexts with all tokens of each sample that is, with its prompt, longer than ``most_tokens``."""
    long = are_long(group, most_tokens)
    pairs = zip(group.samples, contexts, long, strict=True)
    return tuple(sample.sampled_tokens if is_long else context for sample, context, is_long in pairs)


def are_long(group: RolloutGroup, most_tokens: int) -> list[bool]:
    """Say of each sample whether it is, with its prompt, longer than ``most_tokens``, and fits no forward pass."""
    return [len(group.prompt_token_ids) + len(sample.token_ids) > most_tokens for sample in group.samples]


def _context(sample: Sample, step: int, steps_of_versions: Steps, max_lag: int) -> int:
    versions, ends = sample.version_spans[:, 1], np.append(sample.version_spans[1:, 0], len(sample.token_ids))
    if len(sample.segments):
        versions, counts = np.unique(sample.token_versions[sample.sampled], return_counts=True)
        ends = counts.cumsum()
    lags = [step - steps_of_versions.get(PolicyVersion(version), 0) for version in versions.tolist()]
    return max((end for end, lag in zip(ends.tolist(), lags, strict=True) if lag > max_lag), default=0)


def check_supports(group: RolloutGroup) -> None:
    """Raises MessageError: the tokens that could be drawn are missing, or are more than the trainer has memory for."""
    if group.prompt.sampling.top_k and not all(len(sample.support_sizes) for sample in group.samples):
        raise MessageError("expected the tokens that could be drawn with each sample of truncated sampling, found none")
    sizes = [sample.support_sizes for sample in group.samples if len(sample.support_sizes)]
    most = max((int(np.abs(each.astype(np.int64)).max()) for each in sizes), default=0)
    if most > _MOST_DRAWN:
        raise MessageError(
            f"expected at most {_MOST_DRAWN} tokens that could be drawn at a position, for which the trainer has memory, found "
            f"{most}: so many are as probable as the last that sampling.top_k keeps; lower it, or turn truncation off"
        )
