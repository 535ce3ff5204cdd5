"""Lineage and comparison of versions."""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing

from penstock.services.coordinator.schemas.resources import Comparison, Difference, PolicyView
from penstock.services.coordinator.schemas.run import EvaluationView
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.bus.stores.policy.policies import Policies


async def common_ancestor(
    policies: Policies, left: PolicyRecord, right: PolicyRecord, revoked: Collection[PolicyVersion]
) -> PolicyRecord | None:
    """Return the newest version from which both come; None: not recorded."""
    if left.version not in revoked and right.version not in revoked:
        return min(left, right, key=lambda record: record.version)  # a rollback revokes all but one line
    async with aclosing(policies.lineage(left.version)) as lefts, aclosing(policies.lineage(right.version)) as rights:
        left_record, right_record = await anext(lefts, None), await anext(rights, None)
        while left_record is not None and right_record is not None and left_record.version != right_record.version:
            if left_record.version > right_record.version:
                left_record = await anext(lefts, None)
            else:
                right_record = await anext(rights, None)
        return None if right_record is None else left_record


def compare(
    left: PolicyRecord | PolicyView,
    right: PolicyRecord | PolicyView,
    ancestor: PolicyRecord | PolicyView | None,
    evaluated: Mapping[int, Sequence[EvaluationView]],
) -> Comparison:
    start = 0 if ancestor is None else ancestor.step
    evaluations = [each for version in (left.version, right.version) for each in evaluated.get(version, ())]
    accuracy = {each.version: each.accuracy for each in evaluations if each.set == evaluations[0].set}
    names = sorted({*left.metrics, *right.metrics})
    return Comparison(
        left=left.version,
        right=right.version,
        ancestor=None if ancestor is None else ancestor.version,
        left_steps=left.step - start,
        right_steps=right.step - start,
        metrics={name: _difference(left.metrics.get(name), right.metrics.get(name)) for name in names},
        accuracy=_difference(accuracy.get(left.version), accuracy.get(right.version)),
    )


def _difference(left: float | None, right: float | None) -> Difference:
    left, right = (value if value is not None and math.isfinite(value) else None for value in (left, right))
    change = None if left is None or right is None else right - left
    return Difference(left=left, right=right, change=change)
