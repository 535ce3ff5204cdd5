"""Guards: detect failing runs from step reports and the live view.

::

    step reports since the run last began ─▶ rules (pure) ─▶ findings ─▶ new: event, metric, status; maybe pause
    the live view ─────────────────────────▶                        └▶ gone: event, metric

    guard              trips when
    no_signal          each recent group has equal rewards
    kl                 mean KL to the behavior or reference policy is too high
    entropy            mean entropy is too low
    lag                too many samples left as stale
    throughput         median tokens/s fell
    trainer_starving   the trainer mostly waits for groups
    rollouts_starving  replicas lack prompts while groups wait for the trainer
    unscored           consecutive groups were given up, none scored, or no prompt can be generated
    probe              a replica's probe logprobs differ from the trainer's
    stalled            nothing was committed for long

Findings are on the bus for the next leader. The trainer itself handles non-finite steps.
"""

import asyncio
import dataclasses
import logging
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from prometheus_client import Counter, Gauge
from pydantic import TypeAdapter

from penstock.services.coordinator.schemas.run import GuardView, RunView
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import StepReport
from penstock.shared.bus.stores.experience.dead_letters import DeadLetterSource, newest_reason
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat
from penstock.shared.process.telemetry import WEIGHTS_PROBE, tell
from penstock.shared.settings.guards import GUARDS, Action, Guard, GuardsSettings

log = logging.getLogger(__name__)

ACTIVE = Gauge("penstock_coordinator_guard_active", "1 while a guard's condition is true, else 0.", ["guard"])
TRIPS = Counter("penstock_coordinator_guard_trips_total", "How often a guard tripped, by action.", ["guard", "action"])

_EVERY_S = 1.0
"""A window of N seconds has N looks."""
_UNSCORED = (DeadLetterSource.PROMPTS, DeadLetterSource.EPISODES, DeadLetterSource.ROLLOUTS)
_VIEWS = TypeAdapter(list[GuardView])
StepReports = Sequence[StepReport]


# ---------------------------------------------------------------- rules: the problem in a sentence, or ""


def no_signal(reports: StepReports, guards: GuardsSettings, groups_per_step: int) -> str:
    """Check for groups with equal rewards."""
    last = [report for report in reports if _generated(report, groups_per_step)][-guards.steps :]
    with_signal = (_of(report, "zero_std_groups") < _generated(report, groups_per_step) for report in last)
    if len(last) < guards.steps or any(with_signal):
        return ""
    mean = statistics.fmean(_of(report, "reward_mean") for report in last)
    return (
        f"in {guards.steps} steps no group had two different rewards (mean {mean:g}): nothing can be learned from them"
    )


def kl(reports: StepReports, guards: GuardsSettings) -> str:
    bounds = (("kl_mean", guards.limit("kl"), "behavior"), ("reference_kl", guards.limit("reference_kl"), "reference"))
    for name, ceiling, other in bounds:
        mean = _mean(reports, name, guards.sudden_steps)
        if ceiling and mean is not None and mean > ceiling:
            return f"mean KL to the {other} policy over {guards.sudden_steps} steps is {mean:.3g} nats, ceiling {ceiling:g}"
    return ""


def entropy(reports: StepReports, guards: GuardsSettings) -> str:
    mean = _mean(reports, "entropy", guards.steps)
    if mean is None or mean >= guards.limit("entropy"):
        return ""
    return f"mean entropy over {guards.steps} steps is {mean:.3g} nats, floor {guards.limit('entropy'):g}"


def lag(reports: StepReports, guards: GuardsSettings, groups_per_step: int) -> str:
    """Check stale groups, and stale samples of trained groups."""
    last = reports[-guards.steps :]
    stale = sum(_of(report, "dropped_stale") for report in last)
    generated = [_generated(report, groups_per_step) for report in last]
    samples = stale + sum(generated)  # in groups, as dropped ones are counted
    for report, groups in zip(last, generated, strict=True):
        left_out, trained = _of(report, "stale_samples"), report.samples - _of(report, "demonstrations")
        stale += groups * left_out / max(1.0, left_out + trained)
    share = stale / max(1.0, samples)
    if len(last) < guards.steps or share <= guards.limit("lag"):
        return ""
    return f"{share:.0%} of the samples of {guards.steps} steps were dropped as stale, at most {guards.limit('lag'):.0%} expected"


def throughput(reports: StepReports, guards: GuardsSettings) -> str:
    """Check tokens per second against earlier steps."""
    steps = guards.sudden_steps
    speeds = [_of(report, "tokens_per_s") for report in reports]
    now, before = speeds[-steps:], speeds[-5 * steps : -steps]
    if len(before) < 4 * steps:
        return ""
    speed, expected = statistics.median(now), statistics.median(before)
    if speed >= guards.limit("throughput") * expected:
        return ""
    return f"{speed:.4g} trained tokens/s over {steps} steps, {expected:.4g} before them"


def trainer_starving(reports: StepReports, guards: GuardsSettings) -> str:
    """Check whether the trainer mostly waits."""
    last = reports[-guards.steps :]
    total = sum(_of(report, "step_s") for report in last)
    waited = sum(_of(report, "phase_wait_s") for report in last)
    if len(last) < guards.steps or waited <= guards.limit("starving") * total:
        return ""
    return f"the trainer waited {waited / total:.0%} of {guards.steps} steps: rollout or reward is slower; add replicas"


def rollouts_starving(looks: Sequence[bool], window_s: int, share_limit: float) -> str:
    """Check whether replicas lack prompts while groups wait."""
    share = sum(looks) / max(1, len(looks))
    if len(looks) < window_s or share <= share_limit:
        return ""
    return (
        f"in {share:.0%} of the last {window_s} s replicas had no prompts while groups waited for the trainer, which "
        f"is "
        "slower: give it more GPUs, or raise algorithm.max_lag"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class GivenUp:
    """Groups that were given up since the last scored one."""

    unscored: int
    """Generated, but not scored."""
    prompts: int
    """Not generated."""


def unscored(given_up: GivenUp, slots: int, guards: GuardsSettings) -> str:
    """Check for consecutive unscored groups, and for as many refused prompts as slots: fewer may only be faster refused
    than the others are generated.
    """
    if given_up.unscored >= guards.limit("unscored"):
        return f"none of the last {given_up.unscored} groups could be scored"
    if given_up.prompts >= max(guards.limit("unscored"), slots):
        return f"none of the last {given_up.prompts} prompts could be generated"
    return ""


def probe(beats: Iterable[Heartbeat], since_s: float) -> str:
    """Return which replica's newest probe after ``since_s`` differed."""
    for beat in beats:
        for failure in beat.failures:
            if failure.part == WEIGHTS_PROBE and failure.in_a_row and failure.at_s > since_s:
                return f"{beat.replica}: {failure.reason}"
    return ""


def stalled(since_s: float, guards: GuardsSettings) -> str:
    """Check for missing commits."""
    return "" if since_s <= guards.limit("stalled") else f"no step was committed for {since_s:.0f} s"


def _generated(report: StepReport, groups_per_step: int) -> float:
    """Return the step's groups that are no demonstrations of a mixed run, which have no rewards and no lag."""
    return groups_per_step - _of(report, "demonstrations")


def _of(report: StepReport, name: str) -> float:
    return report.metrics.get(name, 0.0)


def _mean(reports: StepReports, name: str, steps: int) -> float | None:
    values = [report.metrics[name] for report in reports[-steps:] if name in report.metrics]
    return statistics.fmean(values) if len(values) >= steps else None


# ---------------------------------------------------------------- the watch


def dump_guards(views: Iterable[GuardView]) -> str:
    return _VIEWS.dump_json(list(views)).decode()


def read_guards(raw: bytes) -> list[GuardView]:
    """Return the findings of the leader.

    >>> read_guards(b"")
    []
    """
    return _VIEWS.validate_json(raw) if raw else []


class Guards:
    """Watch one run.

    Args:
        view: returns the live view.
        reports: newest step reports, oldest first.
        beats: newest heartbeats.
        changed: called after a pause.
        starving_window_s: window of `rollouts_starving`.
    """

    def __init__(
        self,
        bus: Bus,
        ledger: Ledger,
        settings: GuardsSettings,
        groups_per_step: int,
        view: Callable[[], Awaitable[RunView]],
        reports: Callable[[], StepReports],
        beats: Callable[[], Sequence[Heartbeat]],
        changed: Callable[[], None],
        starving_window_s: int,
    ) -> None:
        self._bus = bus
        self._ledger = ledger
        self._settings = settings
        self._groups_per_step = groups_per_step
        self._view = view
        self._reports = reports
        self._beats = beats
        self._changed = changed
        self._looks: deque[bool] = deque(maxlen=starving_window_s)
        self._starving_window_s = starving_window_s
        self._progress = (0.0, 0, GivenUp(0, 0))
        """Running since, groups scored, groups given up then."""
        self._judged_s = 0.0
        self.active: dict[str, GuardView] = {}
        for name in GUARDS:
            ACTIVE.labels(name).set(0)
            TRIPS.labels(name, settings.action(name))

    async def run(self) -> None:
        try:
            self.active = {guard.guard: guard for guard in (await self._view()).guards}
            self._judged_s = max((report.finished_at_s for report in self._reports()), default=0.0)
            for name in self.active:
                ACTIVE.labels(name).set(1)
            while True:
                await self.look(await self._view())
                await asyncio.sleep(_EVERY_S)
        finally:
            for name in self.active:
                ACTIVE.labels(name).set(0)
            self.active.clear()

    async def look(self, view: RunView) -> None:
        """Check the run once, and act."""
        if view.state is not RunState.RUNNING:
            self._looks.clear()
            return  # keep showing the finding that paused it
        status = await self._ledger.status()
        wrong = self._find(view, status.changed_at_s, max(status.last_commit_s or 0.0, status.resumed_s))
        wrong |= await self._find_unscored(view, status.changed_at_s)
        wrong |= self._find_probe(status.changed_at_s)
        before = self.active
        active: dict[str, GuardView] = {
            name: GuardView(
                guard=name,
                action=action,
                detail=sentence,
                since_s=before[name].since_s if name in before else time.time(),
            )
            for name, (action, sentence) in wrong.items()
        }
        for name in [name for name in before if name not in wrong]:
            ACTIVE.labels(name).set(0)
            await tell(self._bus, "guard", f"guard {name} over", "back to normal", guard=name)
        for name in [name for name in wrong if name not in before]:  # the first finding is the pause reason
            await self._trip(name, *wrong[name])
        if active != before:  # last: the next leader treats these as handled
            await self._ledger.note("guards", dump_guards(active.values()))
        self.active = active

    def _find(self, view: RunView, since_s: float, quiet_since_s: float) -> dict[Guard, tuple[Action, str]]:
        guards = self._settings
        reports = [report for report in self._reports() if report.finished_at_s > since_s]
        self._looks.append(
            view.streams["prompts"].entries == 0 and view.streams["experience"].entries >= self._groups_per_step
        )
        quiet_s = time.time() - max(since_s, quiet_since_s)
        texts: dict[Guard, str] = {
            **self._find_in_steps(reports),
            "rollouts_starving": rollouts_starving(self._looks, self._starving_window_s, guards.limit("starving")),
            "stalled": stalled(quiet_s, guards),
        }
        return {name: (guards.action(name), text) for name, text in texts.items() if text and name not in guards.off}

    async def _find_unscored(self, view: RunView, since_s: float) -> dict[Guard, tuple[Action, str]]:
        guards = self._settings
        sentence = unscored(self._given_up_in_a_row(view, since_s), view.slots, guards)
        if not sentence or "unscored" in guards.off:
            return {}
        newest = await newest_reason(self._bus, _UNSCORED)
        cause = newest or "its dead letter is gone"
        return {"unscored": (guards.action("unscored"), f"{sentence}; the newest: {cause}")}

    def _find_probe(self, since_s: float) -> dict[Guard, tuple[Action, str]]:
        if "probe" in self._settings.off:
            return {}
        sentence = probe(self._beats(), since_s)
        return {"probe": (self._settings.action("probe"), sentence)} if sentence else {}

    def _given_up_in_a_row(self, view: RunView, since_s: float) -> GivenUp:
        prompts = view.counts.get("dead:prompts", 0) + view.counts.get("dead:episodes", 0)
        dead = GivenUp(view.counts.get("dead:rollouts", 0), prompts)
        # Scored groups wait for the trainer or have left it; those that died earlier were not scored.
        left = sum(view.counts.values()) - view.counts.get("lost_samples", 0) - dead.unscored - dead.prompts
        scored = left + view.streams["experience"].entries
        if self._progress[0] != since_s or scored > self._progress[1]:
            self._progress = (since_s, scored, dead)
        before = self._progress[2]
        return GivenUp(dead.unscored - before.unscored, dead.prompts - before.prompts)

    def _find_in_steps(self, reports: StepReports) -> dict[Guard, str]:
        """Return findings at new steps, else at the last."""
        new = [end for end, report in enumerate(reports, 1) if report.finished_at_s > self._judged_s]
        if reports:
            self._judged_s = max(self._judged_s, reports[-1].finished_at_s)
        texts: dict[Guard, str] = {}
        for end in new or [len(reports)]:
            texts |= {name: text for name, text in self._find_at(reports[:end]).items() if text}
        return texts

    def _find_at(self, reports: StepReports) -> dict[Guard, str]:
        guards, groups = self._settings, self._groups_per_step
        return {
            "no_signal": no_signal(reports, guards, groups),
            "kl": kl(reports, guards),
            "entropy": entropy(reports, guards),
            "lag": lag(reports, guards, groups),
            "throughput": throughput(reports, guards),
            "trainer_starving": trainer_starving(reports, guards),
        }

    async def _trip(self, name: str, action: Action, sentence: str) -> None:
        ACTIVE.labels(name).set(1)
        TRIPS.labels(name, action).inc()
        log.warning("guard tripped", extra={"guard": name, "action": action, "detail": sentence})
        await tell(self._bus, "guard", f"guard {name}", sentence, guard=name, action=action)
        if action == "pause":
            reason = f"guard {name}: {sentence}; correct the cause and resume, roll back, or change [guards]"
            await self._ledger.transition(RunState.PAUSED, reason, [RunState.RUNNING])
            self._changed()
