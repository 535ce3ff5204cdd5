"""Lineage and comparison of versions."""

import math
from collections.abc import Mapping

from services.coordinator.schemas.resources import Comparison, Difference
from shared.bus.messages import PolicyRecord, PolicyVersion


def ancestors(version: PolicyVersion, records: Mapping[PolicyVersion, PolicyRecord]) -> list[PolicyVersion]:
    """Return ``version`` and its recorded ancestors, newest first."""
    versions: list[PolicyVersion] = []
    at: PolicyVersion | None = version
    while at is not None and at in records:
        versions.append(at)
        at = records[at].parent
    return versions


def compare(
    left: PolicyRecord,
    right: PolicyRecord,
    records: Mapping[PolicyVersion, PolicyRecord],
    accuracy: Mapping[PolicyVersion, float | None],
) -> Comparison:
    of_right = set(ancestors(right.version, records))
    ancestor = next((version for version in ancestors(left.version, records) if version in of_right), None)
    start = 0 if ancestor is None else records[ancestor].step
    names = sorted({*left.metrics, *right.metrics})
    return Comparison(
        left=left.version,
        right=right.version,
        ancestor=ancestor,
        left_steps=left.step - start,
        right_steps=right.step - start,
        metrics={name: _difference(left.metrics.get(name), right.metrics.get(name)) for name in names},
        accuracy=_difference(accuracy.get(left.version), accuracy.get(right.version)),
    )


def _difference(left: float | None, right: float | None) -> Difference:
    left, right = (value if value is not None and math.isfinite(value) else None for value in (left, right))
    change = None if left is None or right is None else right - left
    return Difference(left=left, right=right, change=change)
