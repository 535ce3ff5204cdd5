"""Held-out evaluation on the ``eval_*`` streams, answered by exactly the evaluated version.

::

    start (one script: description, holding, prompts) ──▶ replicas ──▶ reward ──▶ eval_results
                                                                                       │
    end (one script: results by set; holding released) ◀── answers (hash, by problem) ◀┘

An evaluation covers one version and all due sets, and survives restarts. It ends when all problems are answered, its
streams are empty, no replica can serve the version, or the deadline passes. Without any answer, the head is evaluated
instead.
"""

import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from penstock.services.coordinator.admission.admission import drawn_by
from penstock.services.coordinator.admission.dataset import Dataset, subset
from penstock.services.coordinator.evaluation.results import (
    Evaluation,
    played_in,
    sentence,
    summarize,
)
from penstock.shared.bus.bus import Bus, Delivery
from penstock.shared.bus.messages import Experience, PolicyVersion, Prompt, Purpose
from penstock.shared.bus.stores.policy import evaluations as store
from penstock.shared.bus.stores.policy.evaluations import Description, EvaluationRequest, Holding, appoint, holding
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat, heartbeats
from penstock.shared.bus.streams import EVAL_RESULTS, EVALUATION_STREAMS, Stream
from penstock.shared.errors import MessageError
from penstock.shared.process.telemetry import tell
from penstock.shared.settings import Settings
from penstock.shared.settings.evaluation import HeldOutSet

log = logging.getLogger(__name__)

CONSUMER = "coordinator"
_BLOCK_S = 0.2
_LOST_AFTER_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Due:
    sets: tuple[str, ...]
    initial: bool = False
    final: bool = False


Progress = Callable[[int, int], Awaitable[None]]
"""Takes the number of problems with an answer, and that of all, every few seconds."""

GateCheck = Callable[[Evaluation], Awaitable[Evaluation]]
"""Adds the regression gate's verdict."""


class Evaluator:
    """Evaluate versions one at a time.

    Args:
        sets: held-out sets with problems.
        settings: evaluations that sample are truncated as training is.
        interrupted: whether to abandon a version.
    """

    def __init__(
        self,
        bus: Bus,
        sets: Sequence[tuple[HeldOutSet, Dataset]],
        settings: Settings,
        interrupted: Callable[[PolicyVersion], Awaitable[bool]],
        check: GateCheck,
    ) -> None:
        self._bus = bus
        self._sets = sets
        self._settings = settings.evaluation
        self._sampling = settings.sampling
        self._seed = settings.run.seed
        self._environment = settings.episodes.name
        self._interrupted = interrupted
        self._check = check

    @property
    def sets(self) -> list[HeldOutSet]:
        return [held_out for held_out, _ in self._sets]

    async def evaluate(
        self, version: PolicyVersion, step: int, due: Due, progress: Progress | None = None
    ) -> list[Evaluation] | None:
        """Evaluate ``version`` on the due sets, or continue the current evaluation.

        Returns None if interrupted, already evaluated, no longer the head, or unanswered; the streams are left empty.
        """
        description = await self.under_way()
        if description is None:
            description, prompts = self._describe(version, step, due)
            if not await self._start(description, prompts):
                return None
        why = await self._collect(description, progress)
        if why is None:
            await self._clear_streams()
            await self._end(description, [])
            return None
        return await self._report(description, why)

    async def under_way(self) -> Description | None:
        """Return an earlier process's evaluation, if any."""
        return await store.under_way(self._bus)

    def _describe(self, version: PolicyVersion, step: int, due: Due) -> tuple[Description, list[Prompt]]:
        now_s, sets = time.time(), list[EvaluationRequest]()
        prompts: list[Prompt] = []
        for held_out, problems in self._sets:
            if held_out.name not in due.sets:
                continue
            count = len(problems) if due.initial or due.final else held_out.problems
            chosen = subset(len(problems), count, self._seed)
            sampling = drawn_by(self._sampling, held_out.samples, held_out.temperature)
            for index in chosen:
                asked = problems.problems[index].prompt(len(prompts), sampling)
                asked = dataclasses.replace(asked, min_version=version, purpose=Purpose.EVALUATE, admitted_at_s=now_s)
                prompts.append(dataclasses.replace(asked, environment=self._environment))
            sets.append(
                EvaluationRequest(
                    held_out.name, len(chosen), sampling.samples, held_out.correct_above, held_out.pass_at
                )
            )
        return Description(version, step, tuple(sets), due.initial, due.final, now_s), prompts

    async def _start(self, description: Description, prompts: Sequence[Prompt]) -> bool:
        names: tuple[str, ...] = ()
        if not (description.initial or description.final):  # those two block nothing
            able = candidates(await heartbeats(self._bus), description.version)
            names = tuple(beat.replica for beat in able[: self._settings.replicas])
        to_hold = Holding(description.version, names, self._settings.timeout_s)
        return await store.start(self._bus, description, to_hold, prompts)

    # ---------------------------------------------------------------- collect

    async def _collect(self, description: Description, progress: Progress | None) -> str | None:
        """Take answers; return why some are missing, or None if interrupted."""
        async for delivery in self._bus.own(EVAL_RESULTS, Experience, CONSUMER):
            await self._take(description, [delivery])
        reclaim_at_s = time.monotonic() + _LOST_AFTER_S
        while True:
            if await self._interrupted(description.version):
                return None
            deliveries = await self._bus.read(EVAL_RESULTS, Experience, CONSUMER, 64, _BLOCK_S)
            servable = True
            if time.monotonic() >= reclaim_at_s:
                deliveries += await self._bus.reclaim(EVAL_RESULTS, Experience, CONSUMER, _LOST_AFTER_S, 64)
                servable = await self._appoint(description)
                if progress is not None:
                    await progress(await store.answered(self._bus), description.problems)
                reclaim_at_s = time.monotonic() + _LOST_AFTER_S
            await self._take(description, deliveries)
            if (why := await self._over(description, servable=servable)) is not None:
                return why

    async def _take(self, description: Description, deliveries: Sequence[Delivery[Experience]]) -> None:
        for delivery in deliveries:
            try:
                result = delivery.message()
            except MessageError as error:
                await self._bus.bury(delivery, str(error))
                continue
            if result.group.prompt.min_version == description.version:
                await self._keep(description, result)
            await self._bus.acknowledge(delivery)

    async def _keep(self, description: Description, result: Experience) -> None:
        prompt = result.group.prompt
        if result.group.versions != {description.version}:  # its replica's time to keep the version ran out
            log.warning("answer of another version ignored", extra={"problem": prompt.problem})
            return
        if prompt.group_id >= description.problems:
            log.warning("answer to an unknown problem ignored", extra={"problem": prompt.problem})
            return
        above = description.set_of(prompt.group_id).correct_above
        correct = sum(float(reward) > above for reward in result.rewards)
        await store.keep_answer(self._bus, prompt.group_id, correct, played_in(result.group))

    async def _over(self, description: Description, *, servable: bool) -> str | None:
        """Return None while answers may arrive, else why some are missing."""
        if await store.answered(self._bus) >= description.problems:
            return ""
        # One script, so that entries moving between streams are not missed.
        prompts, episodes, rollouts, results = (depth.entries for depth in await self._bus.depths(*EVALUATION_STREAMS))
        if results:
            return None
        if time.time() - description.started_at_s > self._settings.timeout_s:
            return f"after {self._settings.timeout_s:g} s"
        if rollouts:
            return None
        if (prompts or episodes) and not servable:
            return f"as no replica serves version {description.version} any more"
        return None if prompts or episodes else ""

    async def _appoint(self, description: Description) -> bool:
        beats = [beat for beat in await heartbeats(self._bus) if beat.service == "rollout"]
        held = await holding(self._bus)
        able = candidates(beats, description.version)
        if not beats or held is None or any(held.names(beat.replica) for beat in able):
            return True
        names = tuple(beat.replica for beat in able[: self._settings.replicas])
        return bool(names) and await appoint(self._bus, dataclasses.replace(held, replicas=names))

    # ---------------------------------------------------------------- end

    async def _report(self, description: Description, why: str) -> list[Evaluation] | None:
        await self._clear_streams()
        answers, played = await store.answers(self._bus)
        conclusive = bool(answers) or description.initial or description.final or not why.startswith("as ")
        unjudged = summarize(description, answers, why, time.time(), played) if conclusive else []
        judged = [await self._check(evaluation) for evaluation in unjudged]
        if not await self._end(description, judged) or not judged:
            return None
        for evaluation in judged:
            await tell(
                self._bus, CONSUMER, "evaluated", sentence(evaluation), set=evaluation.set,
                version=int(evaluation.version), step=evaluation.step, accuracy=evaluation.accuracy,
            )  # fmt: skip
        return judged

    async def _end(self, description: Description, judged: Sequence[Evaluation]) -> bool:
        return await store.end(self._bus, description.version, [dataclasses.asdict(each) for each in judged])

    async def _clear_streams(self) -> None:
        for stream in EVALUATION_STREAMS:
            while leftovers := await take_all(self._bus, stream):
                for delivery in leftovers:
                    await self._bus.acknowledge(delivery)


async def take_all(bus: Bus, stream: Stream, count: int = 256) -> list[Delivery[object]]:
    """Take up to ``count`` entries of a stream from any consumer."""
    fresh = await bus.read(stream, object, CONSUMER, count, None)
    return fresh or await bus.reclaim(stream, object, CONSUMER, 0.0, count)


def candidates(beats: Iterable[Heartbeat], version: PolicyVersion) -> list[Heartbeat]:
    """Return replicas that can answer as ``version``, those serving it first."""
    able = [
        beat
        for beat in beats
        if beat.service == "rollout" and beat.taking and beat.state != "stopping"
        if beat.version is None or beat.version <= version
    ]
    return sorted(able, key=lambda beat: (beat.version != version, beat.replica))
