"""The API's live view, and the Prometheus gauges.

A look takes two round trips, and one per stream after a change of the dead letters; it is cached for ``_KEEP_S``.
Gauges are set on a schedule.
"""

import asyncio
import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import Gauge

from penstock.services.coordinator.evaluation.results import Evaluation, Evaluations
from penstock.services.coordinator.records.summary import training_seconds
from penstock.services.coordinator.run.guards import read_guards
from penstock.services.coordinator.run.notices import changed_code, compose, dead_letters, silent, too_long
from penstock.services.coordinator.run.replicas import LOOK_S, Replicas
from penstock.services.coordinator.schemas.run import (
    EvaluationView,
    GuardView,
    History,
    NoticeView,
    RunView,
    StreamView,
)
from penstock.shared.advice import advice
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus, Depth
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import PolicyVersion, StepReport
from penstock.shared.bus.stores.experience.dead_letters import newest_reason
from penstock.shared.bus.stores.policy.ledger import RunState, RunStatus
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.stores.run.functions import Change, changes
from penstock.shared.bus.stores.run.overview import overview
from penstock.shared.bus.stores.run.records import newer
from penstock.shared.errors import MessageError
from penstock.shared.files.durable import no_space
from penstock.shared.process.telemetry import Status

STREAM_ENTRIES = Gauge("penstock_coordinator_stream_entries", "Entries in a stream of the run.", ["stream"])
STREAM_PENDING = Gauge("penstock_coordinator_stream_pending", "Entries that a replica holds.", ["stream"])
STREAM_OLDEST_AGE = Gauge(
    "penstock_coordinator_stream_oldest_age_seconds", "How long the oldest entry has been in the stream.", ["stream"]
)
GROUPS_IN_FLIGHT = Gauge("penstock_coordinator_groups_in_flight", "Groups between admission and commit.")
SLOTS = Gauge("penstock_coordinator_slots", "Maximum number of groups in flight.")
RUN_STATE = Gauge("penstock_coordinator_run_state", "1 for the run's current state, else 0.", ["state"])
HEAD_VERSION = Gauge("penstock_coordinator_head_version", "The version that replicas serve; -1: none yet.")
GPU_SECONDS = Gauge("penstock_coordinator_gpu_seconds", "GPU-seconds that the run's processes have held.")
STEP = Gauge("penstock_coordinator_step", "Committed optimizer steps.")
REWOUND_STEPS = Gauge("penstock_coordinator_rewound_steps", "Acknowledged steps that the bus has lost, in all.")
REWOUND_AT = Gauge(
    "penstock_coordinator_rewound_timestamp_seconds",
    "When the bus lost acknowledged steps last, Unix seconds; 0: never.",
)
DEAD_LETTERS = Gauge("penstock_coordinator_dead_letters", "Entries among the dead letters.")
EVALUATION_ACCURACY = Gauge(
    "penstock_coordinator_evaluation_accuracy_ratio", "Newest held-out accuracy, 0 to 1.", ["set"]
)
EVALUATION_ACCURACY_LOW = Gauge(
    "penstock_coordinator_evaluation_accuracy_low_ratio", "Lower end of its 95 % interval.", ["set"]
)
EVALUATION_ACCURACY_HIGH = Gauge(
    "penstock_coordinator_evaluation_accuracy_high_ratio", "Upper end of its 95 % interval.", ["set"]
)
EVALUATION_PASS_AT = Gauge(
    "penstock_coordinator_evaluation_pass_at_ratio",
    "Newest probability that one of k completions is correct.",
    ["set", "k"],
)
EVALUATION_VERSION = Gauge("penstock_coordinator_evaluation_version", "The version evaluated last.", ["set"])
REPLICAS_VERSION = Gauge("penstock_coordinator_replicas_version", "The version that a replica holds.", ["replica"])

SHOWN = (*streams.TRAINING_STREAMS, streams.JOURNAL)
_KEEP_S = 0.1
_HISTORY_STEPS = 60
_EVALUATIONS = 200
_PACE_STEPS = 20
"""Steps for the ETA."""


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    status: RunStatus
    depths: dict[str, StreamView]
    dead: int
    counts: dict[str, int]
    evaluations: list[Evaluation]
    guards: list[GuardView]
    groups_in_flight: int
    changes: Sequence[Change]


class Monitor:
    def __init__(
        self, bus: Bus, live: Live, telling: Status, standing: Callable[[], Sequence[NoticeView]] = tuple
    ) -> None:
        self._bus = bus
        self._live = live
        self._telling = telling
        self._standing = standing
        self.replicas = Replicas(bus, live.settings.internal.heartbeat_s)
        self._history: deque[StepReport] = deque(maxlen=_HISTORY_STEPS)
        self._newest_report = ""
        self._dead, self._dead_reason = 0, ""
        self._evaluations = Evaluations(bus)
        self._evaluation_views: dict[tuple[PolicyVersion, str], EvaluationView] = {}
        self._view: RunView | None = None
        self._text = b""
        self._seen_at_s = -math.inf
        self._forgotten = False
        self._busy = asyncio.Lock()

    async def run(self) -> None:
        while True:
            self._set_gauges(await self.view())
            await self.read_beats()
            await asyncio.sleep(LOOK_S)

    def forget(self) -> None:
        """Invalidate the cache, including a look in progress."""
        self._seen_at_s, self._forgotten = -math.inf, True

    async def view(self) -> RunView:
        """Return the run, at most 100 ms old."""
        async with self._busy:
            if self._view is None or time.monotonic() - self._seen_at_s > _KEEP_S:
                self._forgotten = False
                look, _ = await asyncio.gather(self._look(), self._read_steps())
                self._view = self._compose(look)
                REWOUND_STEPS.set(look.status.rewound.steps)
                REWOUND_AT.set(look.status.rewound.at_s)
                self._seen_at_s = -math.inf if self._forgotten else time.monotonic()
                self._text = self._view.model_dump_json().encode()
            return self._view

    async def text(self) -> bytes:
        """Return :meth:`view` as JSON, encoded once per look."""
        await self.view()
        return self._text

    def reports(self) -> Sequence[StepReport]:
        return tuple(self._history)

    def beats(self) -> Sequence[Heartbeat]:
        return self.replicas.beats

    # ---------------------------------------------------------------- read

    async def _look(self) -> Look:
        dead = [stream.dead for stream in streams.GROUPED_STREAMS]
        depths = await self._bus.depths(*SHOWN, *dead)
        run = await overview(self._bus)
        evaluated = await self._evaluations.read()
        return Look(
            status=run.status,
            depths={
                stream.name: StreamView(**dataclasses.asdict(depth))
                for stream, depth in zip(SHOWN, depths, strict=False)
            },
            dead=await self._count_dead(depths[len(SHOWN) :]),
            counts=run.counts,
            guards=read_guards(run.guards),
            groups_in_flight=run.groups_in_flight,
            changes=changes(run.functions),
            evaluations=_shown([evaluation for evaluation in evaluated if evaluation.version not in run.revoked]),
        )

    async def _count_dead(self, depths: Sequence[Depth]) -> int:
        """Return the number of dead letters; look up the newest one's reason if it changed."""
        dead = sum(depth.entries for depth in depths)
        if dead != self._dead:
            self._dead_reason = await newest_reason(self._bus)
            self._dead = dead
        return dead

    async def _read_steps(self) -> None:
        for entry, fields in reversed(await newer(self._bus, streams.STEPS, self._newest_report, _HISTORY_STEPS)):
            self._newest_report = entry
            try:
                report = wire.decode(fields.get(b"data", b""), StepReport)
            except MessageError:
                continue
            while self._history and self._history[-1].step >= report.step:
                self._history.pop()
            self._history.append(report)

    # ---------------------------------------------------------------- compose

    def _compose(self, look: Look) -> RunView:
        status, settings, views = look.status, self._live.settings, self._evaluation_views
        keys = {(evaluation.version, evaluation.set): evaluation for evaluation in look.evaluations}
        views = self._evaluation_views = {key: views.get(key) or evaluation_view(keys[key]) for key in keys}
        steps = settings.run.steps
        newest = self._history[-1] if self._history else None
        metrics = {} if newest is None else numbers(newest.metrics)
        return RunView(
            run_id=self._bus.run_id,
            state=status.state,
            reason=status.reason,
            closed=status.closed,
            activity=activity(status),
            bus_full=status.bus_full,
            guards=look.guards,
            notices=compose(
                status,
                look.guards,
                look.evaluations,
                self.beats(),
                [
                    *self._silent(status),
                    *changed_code(look.changes),
                    *dead_letters(look.dead, self._dead_reason, status),
                    *too_long(self._history, look.counts.get("dropped:too_long", 0)),
                    *self._standing(),
                ],
            ),
            bound=advice(
                metrics,
                sum(beat.service == "rollout" for beat in self.beats()),
                any(beat.gpus for beat in self.beats()),
                settings.gpu_sharing,
            ),
            self_tests=status.self_tests,
            step=status.step,
            steps=steps,
            head=status.head,
            newest_version=status.newest_version,
            groups_in_flight=look.groups_in_flight,
            slots=settings.slots,
            cursor=status.cursor,
            streams=look.depths,
            counts=look.counts,
            dead=look.dead,
            last=metrics,
            lag_counts={} if newest is None else dict(newest.lag_counts),
            history=_history(self._history),
            evaluations=list(views.values()),
            tokens_per_s=0.0 if status.state is RunState.PAUSED else metrics.get("tokens_per_s") or 0.0,
            drawn_tokens_per_s=sum(
                beat.values.get("tokens_per_s", 0.0) for beat in self.beats() if beat.service == "rollout"
            ),
            started_at_s=status.created_at_s,
            training_s=training_seconds(status, steps, time.time()),
            eta_s=eta_s(status, steps, [report.metrics.get("step_s") for report in self._history]),
            gpu_hours=status.gpu_s / 3600.0,
            bus=self._bus.server,
            settings_revision=self._live.revision,
        )

    def _silent(self, status: RunStatus) -> list[NoticeView]:
        refuses_s = self.replicas.bus_refuses_s()
        settings = self._live.settings
        is_of_run = settings.bus.url.startswith("unix:")  # another host's bus has a disk of its own
        full = no_space(settings.run_folder) if refuses_s is not None and is_of_run else ""
        return silent(self.replicas.silent(), refuses_s, status, full)

    def _set_gauges(self, view: RunView) -> None:
        for name, depth in view.streams.items():
            STREAM_ENTRIES.labels(name).set(depth.entries)
            STREAM_PENDING.labels(name).set(depth.pending)
            STREAM_OLDEST_AGE.labels(name).set(depth.oldest_age_s)
        for state in RunState:
            RUN_STATE.labels(state.value).set(view.state is state)
        GROUPS_IN_FLIGHT.set(view.groups_in_flight)
        SLOTS.set(view.slots)
        HEAD_VERSION.set(-1 if view.head is None else view.head)
        STEP.set(view.step)
        GPU_SECONDS.set(view.gpu_hours * 3600.0)
        DEAD_LETTERS.set(view.dead)
        _set_evaluations(view.evaluations)
        self._telling.values = {"step": float(view.step), "groups_in_flight": float(view.groups_in_flight)}

    async def read_beats(self) -> None:
        beats = await self.replicas.read()
        REPLICAS_VERSION.clear()
        for beat in beats:
            if beat.version is not None:
                REPLICAS_VERSION.labels(beat.replica).set(beat.version)


def _set_evaluations(views: Sequence[EvaluationView]) -> None:
    for evaluation in views:  # oldest first, so the newest of each set remains
        if evaluation.accuracy is None or evaluation.accuracy_low is None or evaluation.accuracy_high is None:
            continue
        EVALUATION_ACCURACY.labels(evaluation.set).set(evaluation.accuracy)
        EVALUATION_ACCURACY_LOW.labels(evaluation.set).set(evaluation.accuracy_low)
        EVALUATION_ACCURACY_HIGH.labels(evaluation.set).set(evaluation.accuracy_high)
        EVALUATION_VERSION.labels(evaluation.set).set(evaluation.version)
        for k, estimate in evaluation.pass_at.items():
            EVALUATION_PASS_AT.labels(evaluation.set, k).set(estimate.value)


def _shown(evaluations: list[Evaluation]) -> list[Evaluation]:
    """Return the first version's results, with which others are compared, and the newest ones."""
    first = [evaluation for evaluation in evaluations[:_EVALUATIONS] if evaluation.version == evaluations[0].version]
    return first + evaluations[len(first) :][-_EVALUATIONS:]


def activity(status: RunStatus) -> str:
    if status.doing:
        return status.doing
    if status.state is RunState.RUNNING and status.bus_full:
        return "waiting for memory on the bus"
    if status.state is RunState.RUNNING:
        return "training" if status.head is not None else "waiting for version 0"
    if status.state is RunState.CREATED:
        return "waiting for version 0" if status.head is None else "waiting to be started"
    return status.state.value


def eta_s(status: RunStatus, steps: int, step_s: Sequence[float | None]) -> float | None:
    """Return the time that the remaining steps take, from the seconds of the newest ones, which have no stop between them."""
    seconds = [seconds for seconds in step_s if seconds is not None][-_PACE_STEPS:]
    if status.state is not RunState.RUNNING or not seconds:
        return None
    return max(0, steps - status.step) * statistics.fmean(seconds)


def numbers(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _history(reports: Sequence[StepReport]) -> History:
    metrics = [numbers(report.metrics) for report in reports]
    return History(
        step=[report.step for report in reports],
        reward_mean=[figures.get("reward_mean") for figures in metrics],
        tokens_per_s=[figures.get("tokens_per_s") for figures in metrics],
    )


def evaluation_view(evaluation: Evaluation) -> EvaluationView:
    return EvaluationView.model_validate(evaluation, from_attributes=True)
