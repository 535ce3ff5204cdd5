"""Lag and staleness of groups."""

from collections.abc import Mapping, Set
from typing import Literal

from shared.bus.messages import PolicyVersion, RolloutGroup

Verdict = Literal["fresh", "stale", "fenced"]


def lag_steps(group: RolloutGroup, step: int, steps_of_versions: Mapping[PolicyVersion, int]) -> int:
    """Return the committed steps since the oldest version that wrote one of the group's tokens.

    Unknown versions count as the initial policy.
    """
    return step - steps_of_versions.get(group.oldest_version, 0)


def judge(
    group: RolloutGroup,
    step: int,
    steps_of_versions: Mapping[PolicyVersion, int],
    revoked: Set[PolicyVersion],
    max_lag: int,
) -> Verdict:
    """Say whether a group is fresh, stale or fenced (a token of a revoked version)."""
    if revoked and not revoked.isdisjoint(group.versions):
        return "fenced"
    return "stale" if lag_steps(group, step, steps_of_versions) > max_lag else "fresh"
