"""The embedded engine: Hugging Face transformers in a thread of its own, weights swapped between two decoding steps.

::

    tasks of the event loop                      the engine's thread
    generate ──▶ inbox ───────────────────────▶  waiting ──▶ batch: prefill, step, step, … ──▶ futures
    swap     ──▶ inbox ──── between two steps ─▶ copy into the parameters, note the version

All requests that wait are decoded as one batch, up to ``max_rows`` samples; which arrive while a batch runs wait for the
next one. (Requests that join a running batch are what vLLM is for.) An idle engine lets requests gather until none has
come for a moment, as one batch of sixteen costs far less than sixteen of one.

Random numbers come from one generator, seeded by the run's seed and the replica's name: the same requests in the same
batches draw the same tokens, but which requests share a batch depends on timing.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, TypeVarTuple, Unpack

import numpy as np
import torch

from services.rollout.decoding import Batch, Tokens
from services.rollout.engine import EngineDied, GeneratedGroup, GeneratedSample, GenerationRequest
from services.rollout.models import OpenedModel
from shared.errors import SettingsError, WeightsError
from shared.messages import PolicyVersion, Sampling

GATHER_S = 0.004
"""An idle engine starts once no further request has come for so long."""

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A request and where its answer goes."""

    request: GenerationRequest
    answer: "asyncio.Future[GeneratedGroup]"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Swap:
    tensors: Mapping[str, torch.Tensor]
    version: PolicyVersion
    answer: "asyncio.Future[None]"


class _Close:
    pass


class TransformersEngine:
    """An :class:`Engine` on a model of transformers.

    Args:
        opened: the model; its parameters belong to the engine from now on.
        seed: of the random numbers; see :func:`seed_of`.
        max_rows: samples that are decoded at a time; a request with more is a batch of its own.
        threads: CPU threads of torch; 0: as torch decides.
    """

    def __init__(self, opened: OpenedModel, *, seed: int, max_rows: int, threads: int = 0) -> None:
        self._opened = opened
        self._seed = seed
        self._max_rows = max_rows
        self._threads = threads
        self._version: PolicyVersion | None = None
        self._inbox: queue.SimpleQueue[_Asked | _Swap | _Close] = queue.SimpleQueue()
        self._waiting: deque[_Asked] = deque()
        self._running: list[_Asked] = []
        self._closing = False
        self._door = threading.Lock()
        self._shut = False
        self._death: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> PolicyVersion | None:
        """The version of the weights that the next token will be drawn from; None before the first swap."""
        return self._version

    async def generate(self, request: GenerationRequest) -> GeneratedGroup:
        """Return a group of completions (see :class:`Engine`)."""
        answer: asyncio.Future[GeneratedGroup] = self._loop.create_future()
        return await self._ask(_Asked(request, answer), answer)

    async def swap(self, tensors: Mapping[str, torch.Tensor], version: PolicyVersion) -> None:
        """Put new weights in place between two decoding steps (see :class:`Engine`)."""
        answer: asyncio.Future[None] = self._loop.create_future()
        await self._ask(_Swap(tensors, version, answer), answer)

    async def close(self) -> None:
        """Stop between two decoding steps; what still waits is cancelled."""
        self._inbox.put(_Close())
        await asyncio.to_thread(self._thread.join)

    async def _ask(self, item: _Asked | _Swap, answer: "asyncio.Future[R]") -> R:
        with self._door:
            if self._shut:
                raise EngineDied(f"the engine's thread has ended: {self._death!r}") from self._death
            self._inbox.put(item)
        return await answer

    # ---------------------------------------------------------------- the engine's thread

    def _live(self) -> None:
        try:
            if self._threads:
                torch.set_num_threads(self._threads)
            generator = torch.Generator(device=self._opened.device).manual_seed(self._seed)
            with torch.inference_mode():
                while self._gather():
                    self._run(self._next_batch(), generator)
        except BaseException as error:  # noqa: BLE001 (the edge of this thread: whoever waits is told, and the process stops)
            self._death = error
        finally:
            self._tell_all()

    def _gather(self) -> bool:
        """Wait until there is something to generate; return False when it is time to close."""
        while not self._waiting and not self._closing:
            self._receive(self._inbox.get())
        with contextlib.suppress(queue.Empty):
            while not self._closing and _rows(self._waiting) < self._max_rows:
                self._receive(self._inbox.get(timeout=GATHER_S))
        return not self._closing

    def _poll(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._receive(self._inbox.get_nowait())

    def _receive(self, item: _Asked | _Swap | _Close) -> None:
        if isinstance(item, _Asked):
            self._waiting.append(item)
        elif isinstance(item, _Swap):
            self._swap(item)
        else:
            self._closing = True

    def _next_batch(self) -> list[_Asked]:
        batch: list[_Asked] = []
        while self._waiting:
            asked = self._waiting[0]
            if batch and _rows(batch) + asked.request.sampling.samples > self._max_rows:
                break
            self._waiting.popleft()
            if not asked.answer.done():
                batch.append(asked)
        return batch

    def _run(self, batch: list[_Asked], generator: torch.Generator) -> None:
        if not batch:
            return
        self._running, started_at_s = batch, time.time()
        tokens = Tokens(self._opened.stop)
        requests = [asked.request for asked in batch]
        decoding = Batch(self._opened.model, requests, tokens, generator, self._opened.device)
        while not decoding.finished and not self._closing:
            if self._version is None:
                raise EngineDied("expected weights before the first request: a bug")
            whole = decoding.step(self._version)
            if whole:
                self._deliver(whole, started_at_s)
            self._poll()
            for place, asked in enumerate(batch):
                if asked.answer.cancelled():
                    decoding.drop(place)
        if decoding.finished:
            self._running = []

    def _deliver(self, whole: Sequence[tuple[int, tuple[GeneratedSample, ...]]], started_at_s: float) -> None:
        now_s = time.time()
        for place, samples in whole:
            self._call(_answer, self._running[place].answer, GeneratedGroup(samples, started_at_s, now_s))

    def _swap(self, item: _Swap) -> None:
        try:
            pairs = _matched(self._opened, item.tensors)
        except WeightsError as error:
            self._call(_refuse, item.answer, error)
            return
        for parameter, tensor in pairs:
            parameter.copy_(tensor)
        if self._opened.device.type == "cuda":
            torch.cuda.synchronize(self._opened.device)
        self._version = item.version
        self._call(_answer, item.answer, None)

    def _tell_all(self) -> None:
        """Cancel what still waits, or tell it of the thread's death; nothing gets in any more."""
        with self._door:
            self._shut = True
        ends: list[asyncio.Future[GeneratedGroup] | asyncio.Future[None]] = [
            asked.answer for asked in (*self._running, *self._waiting)
        ]
        while not self._inbox.empty():
            item = self._inbox.get()
            if not isinstance(item, _Close):
                ends.append(item.answer)
        for answer in ends:
            self._call(_end, answer, self._death)

    def _call(self, callback: Callable[[Unpack[Arguments]], object], *arguments: *Arguments) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback, *arguments)


def try_out(opened: OpenedModel) -> None:
    """Decode two tokens of two samples, so that a model that cannot be decoded like this is known at the start.

    Raises:
        SettingsError: it has no key-value cache of the usual kind, or does not fit its device.
    """
    request = GenerationRequest(np.zeros(1, dtype=np.int32), Sampling(samples=2, max_new_tokens=2, temperature=1.0))
    generator = torch.Generator(device=opened.device)
    try:
        with torch.inference_mode():
            decoding = Batch(opened.model, [request], Tokens(stop=()), generator, opened.device)
            while not decoding.finished:
                decoding.step(PolicyVersion(0))
    except (TypeError, AttributeError, RuntimeError, ValueError, LookupError) as error:
        raise SettingsError(
            f"expected a decoder-only language model with a key-value cache that fits {opened.device}, found "
            f"{type(opened.model).__name__}, which failed to decode ({type(error).__name__}: {error}): "
            "change policy.model or rollout.device"
        ) from error


def seed_of(run_seed: int, replica: str) -> int:
    """Return a replica's seed: different for every replica of a run, the same whenever it starts."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}:{replica}".encode()).digest()[:8], "little") >> 1


def _matched(opened: OpenedModel, tensors: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (parameter, new value) pairs after checking all of them, so that a swap is whole or not at all."""
    missing, unknown = opened.required - tensors.keys(), tensors.keys() - opened.parameters.keys()
    if missing or unknown:
        name = min(missing or unknown)
        raise WeightsError(
            f"expected the tensors of policy.model, found {len(missing)} missing and {len(unknown)} unknown, "
            f"{name!r} for one: trainer and rollout must be configured with the same policy.model"
        )
    pairs = [(opened.parameters[name], tensor) for name, tensor in tensors.items()]
    for name, (parameter, tensor) in zip(tensors, pairs, strict=True):
        if parameter.shape != tensor.shape:
            raise WeightsError(
                f"expected {name!r} of shape {tuple(parameter.shape)}, found {tuple(tensor.shape)}: "
                "trainer and rollout must be configured with the same policy.model"
            )
    return pairs


def _rows(asked: Sequence[_Asked] | deque[_Asked]) -> int:
    return sum(one.request.sampling.samples for one in asked)


def _answer(future: "asyncio.Future[R]", result: R) -> None:
    if not future.done():
        future.set_result(result)


def _refuse(future: "asyncio.Future[None]", error: WeightsError) -> None:
    if not future.done():
        future.set_exception(error)


def _end(future: "asyncio.Future[GeneratedGroup] | asyncio.Future[None]", death: BaseException | None) -> None:
    if future.done():
        return
    if death is None:
        future.cancel()
        return
    error = EngineDied(f"the engine's thread died: {death!r}")
    error.__cause__ = death
    future.set_exception(error)
