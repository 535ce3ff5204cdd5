"""Notices: sentences that every observer of a run should read.

::

    state, guards (bus) ────┐
    heartbeats' failures ───┼──▶ notices ──▶ GET /v1/run ──▶ `penstock up`, `penstock status`, the page
    evaluations (bus) ──────┤
    data, records (here) ───┘

Pure functions.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Literal

from services.coordinator.evaluation.results import Evaluation
from services.coordinator.schemas.run import GuardView, NoticeView
from shared.bus.stores.heartbeats import Heartbeat, PartFailure
from shared.bus.stores.ledger import RunState, RunStatus

_RECENT_S = 600.0
"""How long a recovered part is mentioned."""
_ORDER: dict[str, int] = {"error": 0, "warning": 1}


def notice(about: str, level: Literal["error", "warning"], text: str) -> NoticeView:
    """Return a one-line notice."""
    return NoticeView(about=about, level=level, text=" ".join(text.split()))


def compose(
    status: RunStatus,
    guards: Sequence[GuardView],
    evaluations: Sequence[Evaluation],
    beats: Sequence[Heartbeat],
    standing: Iterable[NoticeView],
) -> list[NoticeView]:
    """Return a run's notices, errors first.

    Args:
        status: the run's.
        guards: active ones.
        evaluations: the branch's, oldest first.
        beats: newest heartbeats.
        standing: own notices on data and records.
    """
    found = [*_state(status), *_guards(guards, status), *_failures(beats), *_unanswered(evaluations), *standing]
    return sorted(found, key=lambda one: _ORDER[one.level])


def _state(status: RunStatus) -> list[NoticeView]:
    found = []
    if status.state is RunState.PAUSED and status.reason:
        found.append(notice("paused", "error", f"paused: {status.reason}"))
    if status.bus_full:
        found.append(notice("bus full", "error", status.bus_full))
    return found


def _guards(guards: Sequence[GuardView], status: RunStatus) -> list[NoticeView]:
    paused = status.state is RunState.PAUSED
    return [
        notice(f"guard {one.guard}", "warning", f"guard {one.guard}: {one.detail}")
        for one in guards
        if not (paused and one.detail in status.reason)
    ]


def _failures(beats: Sequence[Heartbeat]) -> list[NoticeView]:
    by_part: dict[str, list[PartFailure]] = {}
    for beat in beats:
        for failure in beat.failures:
            by_part.setdefault(failure.part, []).append(failure)
    return [found for part, failures in sorted(by_part.items()) if (found := _failure(part, failures)) is not None]


def _failure(part: str, failures: Sequence[PartFailure]) -> NoticeView | None:
    newest = max(failures, key=lambda one: one.at_s)
    failed, in_a_row = sum(one.failed for one in failures), sum(one.in_a_row for one in failures)
    if not in_a_row and time.time() - newest.at_s > _RECENT_S:
        return None
    where = f"{newest.problem}: {newest.reason}"
    if not failed:
        return notice(part, "warning", f"{part}: {where}")
    if in_a_row:
        return notice(part, "error", f"{part} failed {failed} times, the last {in_a_row} in a row; newest at {where}")
    return notice(part, "warning", f"{part} failed {failed} times and works again; newest at {where}")


def _unanswered(evaluations: Sequence[Evaluation]) -> list[NoticeView]:
    newest = {one.set: one for one in evaluations}
    return [
        notice(
            f"evaluation of {one.set}",
            "warning",
            f"the evaluation of version {one.version} on {one.set} has answers to {one.answered} of {one.problems} problems",
        )
        for one in newest.values()
        if one.answered < one.problems
    ]
