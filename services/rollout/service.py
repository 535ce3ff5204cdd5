"""The rollout service: prompts become rollout groups, under the newest weights.

::

    prompts ───────▶ encode ──▶ wait for min_version ──▶ engine.generate ──▶ decode ──▶ rollouts
    eval_prompts ─▶     the same handler, the same batches, training first          ──▶ eval_rollouts
    questions ────▶     the same handler, in the room that training leaves           ──▶ answers
    policy ─▶ follower ──▶ engine.stage, engine.swap      hold ──▶ which version to keep for an evaluation

Evaluation prompts are taken while the held version is served; training prompts unless the head is past a kept version
or cannot be pulled. Shutdown order: workers finish or return prompts, the follower stops, the engine closes.
"""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
from prometheus_client import Gauge

from penstock.services.rollout import samples
from penstock.services.rollout.engines.engine import Engine, GeneratedGroup, GenerationRequest
from penstock.services.rollout.engines.prompts import Codec
from penstock.services.rollout.engines.stop_texts import StopTexts
from penstock.services.rollout.episode_turns import TurnListener
from penstock.services.rollout.eval_priority import Precedence
from penstock.services.rollout.follower import Follower
from penstock.services.rollout.plausibility import Plausibility
from penstock.services.rollout.questions import Answering
from penstock.services.rollout.throughput import Throughput
from penstock.services.rollout.version_hold import Hold
from penstock.shared.bus import streams
from penstock.shared.bus.assembly import bare
from penstock.shared.bus.crowd import Crowd
from penstock.shared.bus.messages import (
    Int32Array,
    PolicyVersion,
    Prompt,
    Purpose,
    RolloutGroup,
    Sampling,
)
from penstock.shared.bus.streams import Stream
from penstock.shared.bus.worker import HandOver, Worker
from penstock.shared.placement.turns import ReplicaTurns, Suspendable
from penstock.shared.process.service import Context
from penstock.shared.process.telemetry import HandlerFailures
from penstock.shared.tasks import beside, together
from penstock.shared.traces import TRACES
from penstock.shared.weights.receiver.puller import Puller

IN_PROGRESS = Gauge(
    "penstock_rollout_entries_in_progress", "Entries (samples in training) being generated or waiting for weights."
)
_MAX_EVALUATION_GROUPS = 512
_REGULATE_S = 0.05
_MANY_TOKENS = 16_384
"""Completions of as many are decoded in a thread, as that takes tens of milliseconds."""


class Generation:
    """The handler: prompt to rollout group, of one sample or of all."""

    def __init__(
        self,
        engine: Engine,
        codec: Codec,
        follower: Follower,
        precedence: Precedence,
        replica: str,
        seed: int = 0,
        plausibility: Plausibility | None = None,
    ) -> None:
        self._engine = engine
        self._precedence, self._codec, self._follower = precedence, codec, follower
        self._replica, self._seed = replica, seed
        self._plausibility = plausibility
        self.throughput = Throughput(engine)

    async def handle(self, prompt: Prompt, purpose: Purpose) -> RolloutGroup:
        """Generate the group of ``prompt`` from the stream of ``purpose``; raises PermanentError or NotHere."""
        with IN_PROGRESS.track_inprogress():
            token_ids = await self._encoded(prompt, purpose)
            sampling = prompt.sampling
            if prompt.sample is not None:
                sampling = dataclasses.replace(sampling, samples=1)
            request = GenerationRequest(token_ids, sampling, seed_of(self._seed, prompt), self._stop(sampling))
            generated = await self.draw(request, prompt.min_version, purpose)
        whole, part = (prompt, "all") if prompt.sample is None else (bare(prompt), f"{prompt.sample}")
        return await self._made(whole, token_ids, [generated], purpose, part)

    async def draw(self, request: GenerationRequest, min_version: PolicyVersion, purpose: Purpose) -> GeneratedGroup:
        """Return what the engine draws with ``min_version`` or newer, at the turn of ``purpose``; raises NotHere.

        A turn of an episode is drawn here: it is no prompt of the bus, and shares room and precedence with those.
        """
        await self._follower.wait_for(min_version)
        async with self._precedence.turn(request.sampling.samples, training=purpose is Purpose.TRAIN):
            if purpose is Purpose.EVALUATE:
                await self._follower.check_kept(min_version)
            drawn = await self._engine.generate(request)
        self.throughput.count(purpose, [drawn])
        return drawn

    async def handle_together(
        self, prompt: Prompt, places: Sequence[int], hand_over: HandOver, purpose: Purpose
    ) -> None:
        """Generate the samples ``places`` of a group; hand over those that ended together, as they end.

        Each is a request of its own. If one fails, the others still end.

        Raises:
            PermanentError, NotHere: no sample can be generated, or one cannot.
        """
        with _in_progress(len(places)) as end:
            token_ids = await self._encoded(prompt, purpose)
            await self._follower.wait_for(prompt.min_version)
            requests = self._requests(prompt, token_ids, places)
            self._precedence.begin(len(places))
            asked = {
                asyncio.ensure_future(self._engine.generate(request)): place for place, request in requests.items()
            }
            failed: BaseException | None = None
            try:
                while asked:
                    done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                    ended = {asked.pop(task): task for task in done}
                    end(len(ended))
                    await self._precedence.end(len(ended))
                    failed = next(filter(None, (task.exception() for task in done)), failed)
                    made = {place: ended[place].result() for place in sorted(ended) if not ended[place].exception()}
                    if made:
                        self.throughput.count(purpose, list(made.values()))
                        names = ",".join(map(str, made))
                        part = await self._made(bare(prompt), token_ids, list(made.values()), purpose, names)
                        await hand_over(dataclasses.replace(part, places=tuple(made)))
            finally:
                for task in asked:
                    task.cancel()
                await self._precedence.end(len(asked))
                await asyncio.gather(*asked, return_exceptions=True)
            if failed is not None:
                raise failed

    async def _encoded(self, prompt: Prompt, purpose: Purpose) -> Int32Array:
        """Return the tokens of a prompt that this replica may generate."""
        if self._plausibility is not None:
            await self._plausibility.check(prompt, purpose)
        if prompt.messages is not None:
            await asyncio.to_thread(self._codec.prepare, prompt)  # a model's template may not end
        return self._codec.encode(prompt)

    def _requests(self, prompt: Prompt, token_ids: Int32Array, places: Sequence[int]) -> dict[int, GenerationRequest]:
        sampling = dataclasses.replace(prompt.sampling, samples=1)
        seeds = seeds_of(self._seed, prompt, places)
        stop = self._stop(sampling)
        return {
            place: GenerationRequest(token_ids, sampling, seed, stop) for place, seed in zip(places, seeds, strict=True)
        }

    def _stop(self, sampling: Sampling) -> StopTexts | None:
        return StopTexts(self._codec.decode, sampling.stop, sampling.min_new_tokens) if sampling.stop else None

    async def _made(
        self, prompt: Prompt, token_ids: Int32Array, generated: Sequence[GeneratedGroup], purpose: Purpose, part: str
    ) -> RolloutGroup:
        started_s = min(each.started_at_s for each in generated)
        finished_s = max(each.finished_at_s for each in generated)
        if purpose is Purpose.TRAIN:
            key = f"{part}/{prompt.requeues}"
            TRACES.add("generated", prompt.group_id, started_s, finished_s, key, samples=part)
        drawn = [sample for each in generated for sample in each.samples]
        texts = await self._texts(token_ids, [sample.token_ids for sample in drawn])
        return RolloutGroup(
            prompt=prompt,
            prompt_token_ids=token_ids,
            samples=await samples.made(self._follower.bus, prompt, drawn, texts, purpose),
            replica=self._replica,
            started_at_s=started_s,
            finished_at_s=finished_s,
        )

    async def _texts(self, prompt_token_ids: Int32Array, completions: Sequence[Int32Array]) -> list[str]:
        if sum(map(len, completions)) < _MANY_TOKENS:
            return self._codec.texts(prompt_token_ids, completions)
        return await asyncio.to_thread(self._codec.texts, prompt_token_ids, completions)


class Rollout:
    """One replica, from start to orderly stop; it owns ``engine`` and ``puller``."""

    def __init__(
        self,
        context: Context,
        engine: Engine,
        codec: Codec,
        puller: Puller,
        turns: ReplicaTurns,
        plausibility: Plausibility | None = None,
    ) -> None:
        self._bus = bus = context.bus
        self._replica = replica = context.replica
        self._engine = engine
        self._turns = turns
        self._status = context.status
        self._puller = puller
        self._cordon = context.cordon.taking
        self._hold = Hold(bus, replica)
        settings = context.settings
        self._follower = Follower(
            bus,
            engine,
            context.status,
            replica,
            puller,
            deadline_s=settings.weights.deadline_s,
            probe_margin=settings.guards.limit("probe"),
            hold=self._hold,
            pulling=functools.partial(turns.pulling, engine),
        )
        precedence = Precedence(settings.rollout.max_groups * settings.sampling.group_size)
        generation = Generation(engine, codec, self._follower, precedence, replica, settings.run.seed, plausibility)
        self._throughput = generation.throughput
        self._listener = TurnListener(context, engine, codec, generation.draw) if settings.episodes.is_on else None
        self._answering = Answering(bus, replica, generation.handle, self._cordon)
        self._training, self._evaluating = asyncio.Event(), asyncio.Event()
        self._regulate()
        self._workers = _workers(context, generation, self._training, self._evaluating)

    async def run(self, stop: asyncio.Event, report_s: float) -> None:
        """Serve until ``stop``, with status every ``report_s``; raises StateLost if the engine died."""
        try:
            async with beside(
                self._follower.run(),
                self._report(stop, report_s),
                self._release(stop),
                self._keep_regulating(),
                self._turns.run(self, cast(Suspendable, self._engine)),
                self._answering.run(),
                *(() if self._listener is None else (self._listener.run(),)),
            ):
                await together(worker.run(stop) for worker in self._workers)
        finally:
            self._status.state = "stopping"
            await self._engine.close()
            await self._puller.close()

    # ---------------------------------------------------------------- turns on a shared device

    async def evaluated(self) -> None:
        """Wait until the engine's version is not kept for an evaluation that this replica can continue."""
        await self._follower.evaluated(self._has_evaluations)

    async def _has_evaluations(self) -> bool:
        """Whether completions are left that this replica generates, or may still take.

        Not those of another replica: if it is suspended, it continues only after the turn that waits for this one.
        """
        self._regulate()
        if not self._evaluating.is_set():
            return self._workers[-1].held > 0
        within_reach = await self._bus.within_reach(streams.EVAL_PROMPTS, self._replica)
        return within_reach + await self._bus.length(streams.EVAL_EPISODES) > 0

    def opened(self) -> None:
        """Take work, and pull the weights again if they were discarded."""
        self._follower.refill()
        self._regulate()

    async def _release(self, stop: asyncio.Event) -> None:
        await stop.wait()
        await self._follower.release()

    async def _keep_regulating(self) -> None:
        while True:
            self._regulate()
            await asyncio.sleep(_REGULATE_S)

    def _regulate(self) -> None:
        open_to_all = self._cordon.is_set()
        held = self._hold.version
        _set(self._training, open_to_all and not self._follower.kept_back and not self._follower.gave_up)
        _set(self._evaluating, open_to_all and held is not None and held == self._engine.version)

    async def _report(self, stop: asyncio.Event, report_s: float) -> None:
        while True:
            held = sum(worker.held for worker in self._workers)
            samples_per_s, tokens_per_s = self._throughput.per_second(time.monotonic())
            self._status.values.update(samples_per_s=samples_per_s, tokens_per_s=tokens_per_s, held=float(held))
            self._status.state = self._state(held, stop.is_set())
            self._note_memory(report_s)
            await asyncio.sleep(report_s)

    def _note_memory(self, seconds: float) -> None:
        phase = "generate" if self._turns.is_open else "train"
        for rank, held in enumerate(self._engine.held):
            self._status.memory.note(held.during(phase, seconds), rank)

    def _state(self, held: int, stopping: bool) -> str:
        if stopping:
            return "stopping"
        if self._follower.failing:
            return "degraded"
        return "working" if held and self._engine.version is not None else "waiting"


def _workers(
    context: Context, generation: Generation, training: asyncio.Event, evaluating: asyncio.Event
) -> tuple[Worker[Prompt, RolloutGroup], Worker[Prompt, RolloutGroup]]:
    """Return the workers of prompts to train, of which entries are samples or whole groups, and to evaluate; each takes
    entries while its event is set.
    """
    settings, whole = context.settings, context.settings.run.deterministic == "run"
    most_groups, group_size = settings.rollout.max_groups, settings.sampling.group_size
    samples = most_groups * group_size
    crowd = Crowd()
    failures = HandlerFailures("generation", context.bus, context.replica, context.status)

    def worker(
        purpose: Purpose, source: Stream, output: Stream, concurrency: int, taking: asyncio.Event, unit: int
    ) -> Worker[Prompt, RolloutGroup]:
        return Worker(
            context.bus,
            context.replica,
            source,
            Prompt,
            output,
            functools.partial(generation.handle, purpose=purpose),
            concurrency,
            context.patience,
            taking,
            crowd=crowd,
            bug=failures.note,
            together=functools.partial(generation.handle_together, purpose=purpose),
            unit=unit,
        )

    most, unit = (most_groups, 1) if whole else (samples, group_size)
    evaluated = max(most_groups, min(samples, _MAX_EVALUATION_GROUPS))
    return (
        worker(Purpose.TRAIN, streams.PROMPTS, streams.ROLLOUTS, most, training, unit),
        worker(Purpose.EVALUATE, streams.EVAL_PROMPTS, streams.EVAL_ROLLOUTS, evaluated, evaluating, 1),
    )


def seed_of(run_seed: int, prompt: Prompt) -> int:
    """Return the seed of a group or a sample: the same on every replica and delivery."""
    return _states(run_seed, prompt, 0)[0] if prompt.sample is None else seeds_of(run_seed, prompt, [prompt.sample])[0]


def seeds_of(run_seed: int, prompt: Prompt, places: Sequence[int]) -> list[int]:
    """Return the seeds of a group's samples."""
    states = _states(run_seed, prompt, max(places) + 1)
    return [states[place + 1] for place in places]


def _states(run_seed: int, prompt: Prompt, samples: int) -> list[int]:
    words = [run_seed, list(Purpose).index(prompt.purpose), prompt.group_id]
    states: list[int] = np.random.SeedSequence(words).generate_state(samples + 1, np.uint64).tolist()
    return states


@contextlib.contextmanager
def _in_progress(entries: int) -> Iterator[Callable[[int], None]]:
    """Count entries in progress; yield the function that counts some of them as ended."""
    left = entries

    def end(ended: int) -> None:
        nonlocal left
        left -= ended
        IN_PROGRESS.dec(ended)

    IN_PROGRESS.inc(entries)
    try:
        yield end
    finally:
        IN_PROGRESS.dec(left)


def _set(event: asyncio.Event, on: bool) -> None:
    if on:
        event.set()
    else:
        event.clear()
