"""Several vLLM engines on one GPU as one :class:`Engine`.

::

    generate ─▶ gate ─▶ router ─▶ engine 0 │ engine 1 │ …            a group belongs to one engine
    stage    ─▶ engine 0 pulls ─▶ the others copy its shadow         CUDA IPC on a GPU, gloo on a CPU
    swap     ─▶ gate shut ─▶ all engines between two of their steps ─▶ gate open
    suspend  ─▶ gate shut ─▶ all engines freeze and free ─▶ resume ─▶ gate open, at the latest after the next swap

Each engine verifies its copy, and reads offers by file itself. Without shadows (``bucketed``) each pulls from the
offer's source, in the swap. No group starts while versions differ: after a partial swap the set is ``torn`` until a
later one succeeds in all.
"""

import asyncio
import contextlib
import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from penstock.services.rollout.engines.engine import (
    EngineDied,
    GeneratedGroup,
    GenerationRequest,
    SwapReport,
    UpdateMode,
)
from penstock.services.rollout.engines.vllm.engine import VllmEngine
from penstock.services.rollout.engines.vllm.swap_gate import SwapGate
from penstock.shared.bus.messages import Float32Array, Int32Array, PolicyRecord, PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.process.memory_timeline import Held
from penstock.shared.weights.receiver.puller import Puller
from penstock.shared.weights.transport.offer import Offer

_PROMPTS = 4096


class Router:
    """Counts outstanding samples per engine; an engine that has read the prompt may have ``slack`` more than others."""

    def __init__(self, engines: int, slack: int = 0) -> None:
        self._slack = slack
        self.outstanding = [0] * engines
        self._engine_of: OrderedDict[bytes, int] = OrderedDict()

    @contextlib.contextmanager
    def turn(self, prompt_token_ids: Int32Array, samples: int) -> Iterator[int]:
        """Yield the engine for a group, whose ``samples`` count as outstanding meanwhile."""
        engine = self._choose(hashlib.blake2b(prompt_token_ids.tobytes(), digest_size=16).digest(), samples)
        self.outstanding[engine] += samples
        try:
            yield engine
        finally:
            self.outstanding[engine] -= samples

    def forget_prompts(self) -> None:
        """Forget prompts, as new weights do not reuse the prefix cache."""
        self._engine_of.clear()

    def _choose(self, prompt: bytes, samples: int) -> int:
        least = min(self.outstanding)
        engine = self._engine_of.pop(prompt, None)
        if engine is None or self.outstanding[engine] > least + max(samples, self._slack):
            engine = self.outstanding.index(least)
        self._engine_of[prompt] = engine
        if len(self._engine_of) > _PROMPTS:
            self._engine_of.popitem(last=False)
        return engine


R = TypeVar("R")
_SLACK = 16
"""Samples by which an engine that has read the prompt may be ahead."""


class EngineSet:
    """Two or more engines; the first serves the others within ``deadline_s`` per wait. Created by ``start``."""

    def __init__(self, engines: Sequence[VllmEngine], *, deadline_s: float) -> None:
        first = engines[0]
        self.engines = tuple(engines)
        self.ranks, self.place, self.peer_address = first.ranks, first.place, first.peer_address
        self.stop, self.context_tokens, self.vocabulary = first.stop, first.context_tokens, first.vocabulary
        self.version: PolicyVersion | None = None
        self._router = Router(len(engines), _SLACK)
        self._gate = SwapGate()
        self._secret = b""
        self._pullers = {
            number: Puller(engine.place, 1, deadline_s, lambda: self._secret)
            for number, engine in enumerate(engines)
            if number
        }
        self._pulls: dict[int, Offer] = {}
        """Of the engines that pull in the swap, beside the first one's."""
        self._probes = 0

    @property
    def torn(self) -> bool:
        """Whether groups wait for a swap of every engine."""
        return any(engine.torn for engine in self.engines) or len({engine.version for engine in self.engines}) > 1

    @property
    def drawn_tokens(self) -> int:
        return self.engines[0].drawn_tokens  # which counts those of all

    @property
    def held(self) -> Sequence[Held]:
        return tuple(held for engine in self.engines for held in engine.held)

    @property
    def memory(self) -> dict[str, float]:
        """Bytes of all engines by component before the last suspension, and their device's capacity."""
        memory: defaultdict[str, float] = defaultdict(float)
        for engine in self.engines:
            for name, nbytes in engine.memory.items():
                memory[name] = nbytes if name == "capacity" else memory[name] + nbytes
        return dict(memory)

    def update_by(self, mode: UpdateMode) -> None:
        for engine in self.engines:
            engine.update_by(mode)

    def share_secret(self, secret: bytes) -> None:
        self._secret = secret
        self.engines[0].share_secret(secret)

    async def generate(self, request: GenerationRequest) -> GeneratedGroup:
        """Return completions, all from one engine."""
        async with self._gate.passage():
            with self._router.turn(request.prompt_token_ids, request.sampling.samples) as number:
                return await self._named(number, self.engines[number].generate(request))

    async def logprobs(self, token_ids: Int32Array) -> Float32Array:
        """Return logprobs of ``token_ids[1:]`` from each engine in turn, so that a probe checks all."""
        number, self._probes = self._probes % len(self.engines), self._probes + 1
        return await self._named(number, self.engines[number].logprobs(token_ids))

    async def stage(self, offer: Offer) -> None:
        await self._withdraw("another version is pulled")
        if offer.transport == "file":
            await self._each(engine.stage(offer) for engine in self.engines)
        elif self.engines[0].bucketed:
            await self._stage_pulls(offer)
        else:
            await self._named(0, self.engines[0].stage(offer))
            await _all(self._named(number, self._pass_on(number, offer)) for number in self._pullers)

    async def _pass_on(self, number: int, offer: Offer) -> None:
        passed = await self._ask(number, self.peer_address, offer)
        async with self._finishing(number, passed):
            await self.engines[number].stage(passed)

    async def _stage_pulls(self, offer: Offer) -> None:
        """Let every engine hold an offer of its own of the same version and source, from which it pulls in the swap."""
        try:
            await self._each(self._stage_pull(number, offer) for number in range(len(self.engines)))
        except BaseException as error:
            await self._withdraw(str(error) or "cancelled")
            raise

    async def _stage_pull(self, number: int, offer: Offer) -> None:
        if number:
            offer = self._pulls[number] = await self._ask(number, offer.source, offer)
        await self.engines[number].stage(offer)

    async def _withdraw(self, error: str) -> None:
        pulls, self._pulls = self._pulls, {}
        await asyncio.gather(*(self._pullers[number].finish(offer, error) for number, offer in pulls.items()))

    async def _ask(self, number: int, source: str, offer: Offer) -> Offer:
        header = offer.header
        record = PolicyRecord(header.version, None, header.step, 0.0, header.digest, "")
        return await self._pullers[number].ask(source, record)

    @contextlib.asynccontextmanager
    async def _finishing(self, number: int, offer: Offer) -> AsyncIterator[None]:
        """Report the end of a pull, or its failure, to the source."""
        try:
            yield
        except BaseException as error:
            await self._pullers[number].finish(offer, str(error) or "cancelled")
            raise
        await self._pullers[number].finish(offer, None)

    async def swap(self, version: PolicyVersion) -> SwapReport:
        await self._gate.shut()
        try:
            reports = await self._each(self._swap(number, version) for number in range(len(self.engines)))
            self._router.forget_prompts()
            self.version = version
        finally:
            if not self.torn:
                await self._gate.open()
        slowest = max(report.seconds for report in reports)
        return SwapReport(slowest, reports[0].path, sum(report.copied_bytes for report in reports))

    async def _swap(self, number: int, version: PolicyVersion) -> SwapReport:
        pull = self._pulls.pop(number, None)
        async with contextlib.nullcontext() if pull is None else self._finishing(number, pull):
            return await self.engines[number].swap(version)

    # ---------------------------------------------------------------- a shared device

    async def suspend(self, rung: int) -> None:
        """Freeze the requests of every engine and free its memory down to ``rung``; no group starts meanwhile."""
        await self._gate.shut()
        await self._each(engine.suspend(rung) for engine in self.engines)
        if any(engine.version is None for engine in self.engines):
            self.version = None

    async def resume(self) -> None:
        """Let every engine continue; after the next swap of all of them, if weights were discarded."""
        await self._each(engine.resume() for engine in self.engines)
        if self.version is not None and not self.torn:
            await self._gate.open()

    # ---------------------------------------------------------------- living and dying

    async def _each(self, work: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
        """Return every engine's result of ``work``, in their order; a failure names its engine."""
        return await _all(self._named(number, part) for number, part in enumerate(work))

    async def _named(self, number: int, work: Awaitable[R]) -> R:
        try:
            return await work
        except (EngineDied, WeightsError) as error:
            raise type(error)(f"engine {number} of {len(self.engines)}: {error}") from error

    async def close(self) -> None:
        await asyncio.gather(*(puller.close() for puller in self._pullers.values()))
        await asyncio.gather(*(engine.close() for engine in self.engines))


async def _all(work: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    results = await asyncio.gather(*work, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        raise max(failures, key=lambda failure: isinstance(failure, EngineDied))
    return [result for result in results if not isinstance(result, BaseException)]
