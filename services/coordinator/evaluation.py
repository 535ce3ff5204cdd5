"""Held-out evaluation: problems decoded greedily by the same replicas, on the ``eval_*`` streams.

::

    start (one script: description + prompts) ──▶ replicas ──▶ reward ──▶ eval_results ──▶ answers (hash) ──▶ end (one script)

An evaluation is named by its version and survives a restart of the coordinator: it goes on where it was. Answers are kept
by problem, so one that arrives twice counts once. It is over when every problem has an answer, when nothing of it lies in
the streams any more (the rest is dead), or at its deadline; then it reports on the answers that it has. Replicas move on
while they answer: all answers come from the evaluated version or a later one, and the result says from which.
When to evaluate is ``lifecycle``'s matter.
"""

import dataclasses
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from services.coordinator.dataset import Dataset, subset
from shared import streams, wire
from shared.bus import Argument, Bus, Delivery
from shared.errors import MessageError
from shared.messages import Experience, PolicyVersion, Purpose, Sampling
from shared.settings import EvaluationSettings
from shared.streams import EVAL_RESULTS, Stream
from shared.telemetry import tell

log = logging.getLogger(__name__)

CONSUMER = "coordinator"
EVALUATION_STREAMS = (streams.EVAL_PROMPTS, streams.EVAL_ROLLOUTS, streams.EVAL_RESULTS)
_BLOCK_S = 0.2
_LOST_AFTER_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """An evaluation that is under way."""

    version: PolicyVersion
    step: int
    problems: int
    initial: bool
    final: bool
    started_at_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found. ``accuracy`` = correct / answered; None when nothing was answered."""

    version: PolicyVersion
    step: int
    problems: int
    """How many were asked."""
    answered: int
    correct: int
    accuracy: float | None
    initial: bool
    final: bool
    oldest_version: PolicyVersion | None
    newest_version: PolicyVersion | None
    """The versions that answered: the evaluated one, or later ones where training went on meanwhile."""
    started_at_s: float
    seconds: float
    note: str
    """Why problems are without an answer; empty when all have one."""


class Evaluator:
    """Evaluates versions, one at a time, and keeps what it found on the bus.

    Args:
        sampling: greedy, one sample.
        interrupted: says whether to give up on a version (the run was stopped, the version revoked).
    """

    def __init__(
        self,
        bus: Bus,
        dataset: Dataset,
        settings: EvaluationSettings,
        sampling: Sampling,
        seed: int,
        interrupted: Callable[[PolicyVersion], Awaitable[bool]],
    ) -> None:
        self._bus = bus
        self._dataset = dataset
        self._settings = settings
        self._sampling = sampling
        self._seed = seed
        self._interrupted = interrupted

    async def evaluate(self, version: PolicyVersion, step: int, *, initial: bool, final: bool) -> Evaluation | None:
        """Evaluate ``version``, or go on with the evaluation that is under way.

        Returns None when it was interrupted or ``version`` was evaluated before; nothing is left on the streams.
        """
        description = await self.under_way()
        if description is None:
            count = len(self._dataset) if initial or final else self._settings.problems
            chosen = subset(len(self._dataset), count, self._seed)
            description = Description(version, step, len(chosen), initial, final, time.time())
            if not await self._start(description, chosen):
                return None
        if not await self._collect(description):
            await self._clear_streams()
            await self._end(description, None)
            return None
        return await self._report(description)

    async def under_way(self) -> Description | None:
        """Return the evaluation that an earlier process began, if any."""
        client, key = self._bus.client, self._bus.keys.evaluation
        text = await self._bus.call(lambda: client.hget(key, "description"))
        return None if text is None else Description(**json.loads(text))

    async def _start(self, description: Description, chosen: Sequence[int]) -> bool:
        prompts = [
            dataclasses.replace(
                self._dataset.problems[index].prompt(place, self._sampling),
                min_version=description.version,
                purpose=Purpose.EVALUATE,
                admitted_at_s=description.started_at_s,
            )
            for place, index in enumerate(chosen)
        ]
        keys = [self._bus.keys.evaluation, self._bus.keys.evaluations, self._bus.keys.of(streams.EVAL_PROMPTS)]
        text = json.dumps(dataclasses.asdict(description))
        arguments: list[Argument] = [description.version, text, *(wire.encode(prompt) for prompt in prompts)]
        return bool(await self._bus.script("start_evaluation", keys, arguments))

    # ---------------------------------------------------------------- collect

    async def _collect(self, description: Description) -> bool:
        """Take answers until the evaluation is over; False when it was interrupted."""
        await self._take(description, await self._bus.read_own(EVAL_RESULTS, Experience, CONSUMER, 100_000))
        reclaim_at_s = time.monotonic() + _LOST_AFTER_S
        while True:
            if await self._interrupted(description.version):
                return False
            deliveries = await self._bus.read(EVAL_RESULTS, Experience, CONSUMER, 64, _BLOCK_S)
            if time.monotonic() >= reclaim_at_s:
                deliveries += await self._bus.reclaim(EVAL_RESULTS, Experience, CONSUMER, _LOST_AFTER_S, 64)
                reclaim_at_s = time.monotonic() + _LOST_AFTER_S
            await self._take(description, deliveries)
            if await self._is_over(description):
                return True

    async def _take(self, description: Description, deliveries: Sequence[Delivery[Experience]]) -> None:
        for delivery in deliveries:
            try:
                result = delivery.message()
            except MessageError as error:
                await self._bus.bury(delivery, str(error))
                continue
            if result.group.prompt.min_version == description.version:
                await self._keep(delivery.group_id, result)
            await self._bus.acknowledge(delivery)

    async def _keep(self, problem: str, result: Experience) -> None:
        versions = result.group.versions
        answer = json.dumps([float(result.rewards[0]), min(versions), max(versions)])
        await self._bus.write(self._bus.keys.evaluation_answers, "HSETNX", problem, answer)

    async def _answered(self) -> int:
        client, key = self._bus.client, self._bus.keys.evaluation_answers
        return int(await self._bus.call(lambda: client.hlen(key)))

    async def _is_over(self, description: Description) -> bool:
        if await self._answered() >= description.problems:
            return True
        keys = [self._bus.keys.of(stream) for stream in EVALUATION_STREAMS]
        # One script: an entry on its way from one stream to the next must not be missed.
        rows = await self._bus.script("depths", keys, [""] * len(keys))
        *asked, results = (int(entries) for entries, _, _ in rows)
        late = time.time() - description.started_at_s > self._settings.timeout_s
        return results == 0 and (late or sum(asked) == 0)

    # ---------------------------------------------------------------- end

    async def _report(self, description: Description) -> Evaluation | None:
        await self._clear_streams()
        client, key = self._bus.client, self._bus.keys.evaluation_answers
        raw = await self._bus.call(lambda: client.hgetall(key))
        result = summarize(
            description, [json.loads(text) for text in raw.values()], self._settings.correct_above, time.time()
        )
        if not await self._end(description, result):
            return None
        accuracy = "failed" if result.accuracy is None else f"accuracy {result.accuracy:.4f}"
        await tell(
            self._bus,
            CONSUMER,
            "evaluated",
            f"version {result.version}: {accuracy} ({result.correct} of {result.answered}) {result.note}".rstrip(),
            **{name: value for name, value in dataclasses.asdict(result).items() if name != "note"},
        )
        return result

    async def _end(self, description: Description, result: Evaluation | None) -> bool:
        keys = [self._bus.keys.evaluation, self._bus.keys.evaluations, self._bus.keys.evaluation_answers]
        text = "" if result is None else json.dumps(dataclasses.asdict(result))
        return bool(await self._bus.script("end_evaluation", keys, [description.version, text]))

    async def _clear_streams(self) -> None:
        for stream in EVALUATION_STREAMS:
            while leftovers := await take_all(self._bus, stream):
                for delivery in leftovers:
                    await self._bus.acknowledge(delivery)


async def take_all(bus: Bus, stream: Stream, count: int = 256) -> list[Delivery[object]]:
    """Take up to ``count`` entries of a stream out of whoever's hands they are in; an empty list when none is left."""
    fresh = await bus.read(stream, object, CONSUMER, count, None)
    return fresh or await bus.reclaim(stream, object, CONSUMER, 0.0, count)


async def evaluations(bus: Bus) -> list[Evaluation]:
    """Return what every evaluation of the run found, by version."""
    raw = await bus.call(lambda: bus.client.hgetall(bus.keys.evaluations))
    return read_evaluations(raw)


def read_evaluations(raw: dict[bytes, bytes]) -> list[Evaluation]:
    """Return the evaluations in the answer to HGETALL, by version."""
    return sorted((Evaluation(**json.loads(text)) for text in raw.values()), key=lambda found: found.version)


def summarize(
    description: Description, answers: Sequence[tuple[float, int, int]], correct_above: float, now_s: float
) -> Evaluation:
    """Return what ``answers`` (reward, oldest version, newest version) amount to."""
    correct = sum(reward > correct_above for reward, _, _ in answers)
    missing = description.problems - len(answers)
    return Evaluation(
        version=description.version,
        step=description.step,
        problems=description.problems,
        answered=len(answers),
        correct=correct,
        accuracy=correct / len(answers) if answers else None,
        initial=description.initial,
        final=description.final,
        oldest_version=PolicyVersion(min(oldest for _, oldest, _ in answers)) if answers else None,
        newest_version=PolicyVersion(max(newest for _, _, newest in answers)) if answers else None,
        started_at_s=description.started_at_s,
        seconds=now_s - description.started_at_s,
        note=f"{missing} of {description.problems} problems are without an answer" if missing else "",
    )
