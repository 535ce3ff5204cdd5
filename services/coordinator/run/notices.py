"""Notices: sentences that every observer of a run should read. Pure functions."""

import time
from collections.abc import Iterable, Sequence
from typing import Literal

from penstock.services.coordinator.evaluation.results import Evaluation
from penstock.services.coordinator.schemas.run import GuardView, NoticeView
from penstock.shared.bus.messages import StepReport
from penstock.shared.bus.stores.policy.ledger import ENDED, RunState, RunStatus
from penstock.shared.bus.stores.policy.rollback import ON_REQUEST, ROLLED_BACK, ROLLING_BACK
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat, PartFailure
from penstock.shared.bus.stores.run.functions import Change

_RECENT_S = 600.0
"""How long a recovered part is mentioned."""
_ORDER: dict[str, int] = {"error": 0, "warning": 1, "info": 2}


def notice(about: str, level: Literal["error", "warning", "info"], text: str) -> NoticeView:
    return NoticeView(about=about, level=level, text=" ".join(text.split()))


def compose(
    status: RunStatus,
    guards: Sequence[GuardView],
    evaluations: Sequence[Evaluation],
    beats: Sequence[Heartbeat],
    standing: Iterable[NoticeView],
) -> list[NoticeView]:
    notices = [*_state(status), *_guards(guards, status), *_failures(beats), *_unanswered(evaluations), *standing]
    return sorted(notices, key=lambda entry: _ORDER[entry.level])


def silent(
    replicas: Sequence[tuple[Heartbeat, float]], bus_refuses_s: float | None, status: RunStatus, full: str = ""
) -> list[NoticeView]:
    """Return a notice of each replica whose heartbeats have ceased, by its last one and the seconds since, or of the bus.

    ``full``: that the run's disk is full, to which an embedded bus writes.
    """
    if bus_refuses_s is not None:
        why = f"it answers, but refuses writes: {full or 'see its log'}"
        return [
            notice("bus", "error", f"the bus has taken no heartbeat of any replica for {bus_refuses_s:.0f} s: {why}")
        ]
    return [
        notice(
            f"{beat.replica} is silent",
            "error",
            f"{beat.replica} has sent no heartbeat for {seconds:.0f} s: process {beat.pid} on {beat.host} is frozen, has died, "
            "or does not reach the bus",
        )
        for beat, seconds in replicas
        if status.state not in ENDED
    ]


def changed_code(changes: Sequence[Change]) -> list[NoticeView]:
    return [notice(f"code of {change.function}", "warning", change.sentence) for change in changes]


def too_long(reports: Sequence[StepReport], groups: int) -> list[NoticeView]:
    """Return the notice of samples of the newest steps, and of groups of the run, that fit no forward pass."""
    samples = int(sum(report.metrics.get("too_long_samples", 0.0) for report in reports))
    if not samples + groups:
        return []
    text = (
        f"{samples} samples of the last {len(reports)} steps, and {groups} whole groups of the run, are longer than "
        "trainer.micro_batch_tokens (times trainer.sequence_parallel) and were not trained: raise it, or lower sampling.max_new_tokens"
    )
    return [notice("long samples", "warning", text)]


def dead_letters(count: int, newest: str, status: RunStatus) -> list[NoticeView]:
    """Return the notice of groups that were given up, unless a guard paused the run for the newest one's reason."""
    if not count or (newest and newest in status.reason):
        return []
    text = f"dead letters: {count}, the newest: {newest}; `penstock dead` lists them"
    return [notice("dead letters", "warning", text)]


def _state(status: RunStatus) -> list[NoticeView]:
    notices = []
    if status.state is RunState.PAUSED and status.reason:
        is_asked, goes_back, is_back = map(status.reason.startswith, (ON_REQUEST, ROLLING_BACK, ROLLED_BACK))
        how = "" if goes_back else "; `penstock resume` continues"
        text = f"paused{'' if is_asked else ':'} {status.reason}{how}"
        notices.append(notice("paused", "info" if is_asked or goes_back or is_back else "error", text))
    if status.rewound.steps:
        total = f"{status.rewound.steps} steps and {status.rewound.groups} groups in all"
        notices.append(notice("bus rewound", "warning", f"{status.rewound.detail} ({total})"))
    if status.bus_full:
        notices.append(notice("bus full", "error", status.bus_full))
    for artifact, why in status.missing.items():
        notices.append(notice(artifact, "error", f"the newest {artifact} could not be written: {why}"))
    return notices


def _guards(guards: Sequence[GuardView], status: RunStatus) -> list[NoticeView]:
    paused = status.state is RunState.PAUSED
    return [
        notice(f"guard {guard.guard}", "warning", f"guard {guard.guard}: {guard.detail}")
        for guard in guards
        if not (paused and guard.detail in status.reason)
    ]


def _failures(beats: Sequence[Heartbeat]) -> list[NoticeView]:
    by_part: dict[str, list[PartFailure]] = {}
    for beat in beats:
        for failure in beat.failures:
            by_part.setdefault(failure.part, []).append(failure)
    return [
        part_notice
        for part, failures in sorted(by_part.items())
        if (part_notice := _failure(part, failures)) is not None
    ]


def _failure(part: str, failures: Sequence[PartFailure]) -> NoticeView | None:
    newest = max(failures, key=lambda failure: failure.at_s)
    failed, in_a_row = sum(failure.failed for failure in failures), sum(failure.in_a_row for failure in failures)
    if not in_a_row and time.time() - newest.at_s > _RECENT_S:
        return None
    where = f"{newest.problem}: {newest.reason}"
    if not failed:
        return notice(part, "warning", f"{part}: {where}")
    if in_a_row:
        return notice(part, "error", f"{part} failed {failed} times, the last {in_a_row} in a row; newest at {where}")
    return notice(part, "warning", f"{part} failed {failed} times and works again; newest at {where}")


def _unanswered(evaluations: Sequence[Evaluation]) -> list[NoticeView]:
    newest = {evaluation.set: evaluation for evaluation in evaluations}
    return [
        notice(
            f"evaluation of {evaluation.set}",
            "warning",
            f"the evaluation of version {evaluation.version} on {evaluation.set} has answers to {evaluation.answered} of {evaluation.problems} problems",
        )
        for evaluation in newest.values()
        if evaluation.answered < evaluation.problems
    ]
