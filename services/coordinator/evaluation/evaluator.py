"""Held-out evaluation: problems asked of the same replicas, on the ``eval_*`` streams, answered by exactly the evaluated version.

::

    start (one script: description, holding, prompts) ──▶ replicas that keep the version ──▶ reward ──▶ eval_results
                                                                                                          │
    end (one script: what was found, by set; the holding is gone) ◀── answers (hash, by problem) ◀────────┘

An evaluation is of one version and all sets that are due, and survives a restart of the coordinator: it goes on where it was. Answers
are kept by problem, so one that arrives twice counts once; one that another version had a part in does not count. It is over when
every problem has an answer, when nothing of it lies in the streams any more (the rest is dead), when no replica can serve the version any
more, or at its deadline; then it reports on the answers that it has, or, without any, is as if it had not been, so that the head is
evaluated instead. When to evaluate is ``lifecycle``'s matter, who keeps a version ``shared.bus.stores.evaluations``'s.
"""

import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from services.coordinator.admission.dataset import Dataset, subset
from services.coordinator.evaluation.results import (
    Evaluation,
    sentence,
    summarize,
)
from shared.bus.bus import Bus, Delivery
from shared.bus.messages import Experience, PolicyVersion, Prompt, Purpose, Sampling
from shared.bus.stores import evaluations as store
from shared.bus.stores.evaluations import Description, EvaluationRequest, Holding, appoint, holding
from shared.bus.stores.heartbeats import Heartbeat, heartbeats
from shared.bus.streams import EVAL_RESULTS, EVALUATION_STREAMS, Stream
from shared.errors import MessageError
from shared.process.telemetry import tell
from shared.settings.evaluation import EvaluationSettings, HeldOutSet

log = logging.getLogger(__name__)

CONSUMER = "coordinator"
_BLOCK_S = 0.2
_LOST_AFTER_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Due:
    """An evaluation that should be made now."""

    sets: tuple[str, ...]
    initial: bool = False
    final: bool = False


Judge = Callable[[Evaluation], Awaitable[Evaluation]]
"""Fills in what the gate says."""


class Evaluator:
    """Evaluates versions, one at a time, and keeps what it found on the bus.

    Args:
        sets: the held-out sets with their problems.
        max_new_tokens: longest completion.
        interrupted: says whether to give up on a version (the run was stopped, the version revoked).
    """

    def __init__(
        self,
        bus: Bus,
        sets: Sequence[tuple[HeldOutSet, Dataset]],
        settings: EvaluationSettings,
        max_new_tokens: int,
        seed: int,
        interrupted: Callable[[PolicyVersion], Awaitable[bool]],
        judge: Judge,
    ) -> None:
        self._bus = bus
        self._sets = sets
        self._settings = settings
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._interrupted = interrupted
        self._judge = judge

    @property
    def sets(self) -> list[HeldOutSet]:
        """The held-out sets."""
        return [held_out for held_out, _ in self._sets]

    async def evaluate(self, version: PolicyVersion, step: int, due: Due) -> list[Evaluation] | None:
        """Evaluate ``version`` on the sets that are due, or go on with the evaluation that is under way.

        Returns None when it was interrupted, ``version`` was evaluated before or is no longer the head, or nobody answered; nothing is left
        on the streams.
        """
        description = await self.under_way()
        if description is None:
            description, prompts = self._describe(version, step, due)
            if not await self._start(description, prompts):
                return None
        why = await self._collect(description)
        if why is None:
            await self._clear_streams()
            await self._end(description, [])
            return None
        return await self._report(description, why)

    async def under_way(self) -> Description | None:
        """Return the evaluation that an earlier process began, if any."""
        return await store.under_way(self._bus)

    def _describe(self, version: PolicyVersion, step: int, due: Due) -> tuple[Description, list[Prompt]]:
        now_s, sets = time.time(), list[EvaluationRequest]()
        prompts: list[Prompt] = []
        for held_out, problems in self._sets:
            if held_out.name not in due.sets:
                continue
            count = len(problems) if due.initial or due.final else held_out.problems
            chosen = subset(len(problems), count, self._seed)
            sampling = Sampling(held_out.samples, self._max_new_tokens, held_out.temperature)
            for index in chosen:
                asked = problems.problems[index].prompt(len(prompts), sampling)
                prompts.append(
                    dataclasses.replace(asked, min_version=version, purpose=Purpose.EVALUATE, admitted_at_s=now_s)
                )
            sets.append(
                EvaluationRequest(
                    held_out.name, len(chosen), sampling.samples, held_out.correct_above, held_out.pass_at
                )
            )
        return Description(version, step, tuple(sets), due.initial, due.final, now_s), prompts

    async def _start(self, description: Description, prompts: Sequence[Prompt]) -> bool:
        names: tuple[str, ...] = ()
        if not (description.initial or description.final):  # those two hold nobody up
            able = candidates(await heartbeats(self._bus), description.version)
            names = tuple(beat.replica for beat in able[: self._settings.replicas])
        to_hold = Holding(description.version, names, self._settings.timeout_s)
        return await store.start(self._bus, description, to_hold, prompts)

    # ---------------------------------------------------------------- collect

    async def _collect(self, description: Description) -> str | None:
        """Take answers until the evaluation is over; return why answers are missing, or None when it was interrupted."""
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
        if result.group.versions != {description.version}:  # its replica had kept the version for as long as it may
            log.warning("answer of another version left out", extra={"problem": prompt.problem})
            return
        if prompt.group_id >= description.problems:
            log.warning("answer to a problem that was not asked left out", extra={"problem": prompt.problem})
            return
        above = description.set_of(prompt.group_id).correct_above
        correct = sum(float(reward) > above for reward in result.rewards)
        await store.keep_answer(self._bus, prompt.group_id, correct)

    async def _over(self, description: Description, *, servable: bool) -> str | None:
        """Return None while there is something to wait for, else why answers are missing (empty: none are, or they are dead)."""
        if await store.answered(self._bus) >= description.problems:
            return ""
        # One script: an entry on its way from one stream to the next must not be missed.
        prompts, rollouts, results = (depth.entries for depth in await self._bus.depths(*EVALUATION_STREAMS))
        if results:
            return None
        if time.time() - description.started_at_s > self._settings.timeout_s:
            return f"after {self._settings.timeout_s:g} s"
        if rollouts:
            return None
        if prompts and not servable:
            return f"as no replica serves version {description.version} any more"
        return None if prompts else ""

    async def _appoint(self, description: Description) -> bool:
        """See to it that a replica that is there keeps the version; False when none can any more."""
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
        answers = await store.answers(self._bus)
        wanted = bool(answers) or description.initial or description.final or not why.startswith("as ")
        found = summarize(description, answers, why, time.time()) if wanted else []
        judged = [await self._judge(evaluation) for evaluation in found]
        if not await self._end(description, judged) or not judged:
            return None
        for evaluation in judged:
            await tell(
                self._bus, CONSUMER, "evaluated", sentence(evaluation), set=evaluation.set,
                version=int(evaluation.version), step=evaluation.step, accuracy=evaluation.accuracy,
            )  # fmt: skip
        return judged

    async def _end(self, description: Description, found: Sequence[Evaluation]) -> bool:
        return await store.end(self._bus, description.version, [dataclasses.asdict(each) for each in found])

    async def _clear_streams(self) -> None:
        for stream in EVALUATION_STREAMS:
            while leftovers := await take_all(self._bus, stream):
                for delivery in leftovers:
                    await self._bus.acknowledge(delivery)


async def take_all(bus: Bus, stream: Stream, count: int = 256) -> list[Delivery[object]]:
    """Take up to ``count`` entries of a stream out of whoever's hands they are in; an empty list when none is left."""
    fresh = await bus.read(stream, object, CONSUMER, count, None)
    return fresh or await bus.reclaim(stream, object, CONSUMER, 0.0, count)


def candidates(beats: Iterable[Heartbeat], version: PolicyVersion) -> list[Heartbeat]:
    """Return the replicas that can answer as ``version``: those that serve it first, then those that are not past it."""
    able = [
        beat
        for beat in beats
        if beat.service == "rollout" and beat.taking and beat.state != "stopping"
        if beat.version is None or beat.version <= version
    ]
    return sorted(able, key=lambda beat: (beat.version != version, beat.replica))
