"""The embedded engine: Hugging Face transformers in its own thread; weights are swapped between two decoding steps.

::

    tasks of the event loop                      the engine's thread
    generate ──▶ inbox ───────────────────────▶  waiting ──▶ batch: prefill, step, step, … ──▶ futures
    swap     ──▶ inbox ──── between two steps ─▶ copy the shadow into the parameters, note the version
    logprobs ──▶ inbox ──── between two steps ─▶ one forward pass
    suspend  ──▶ inbox ──── between two steps ─▶ free memory down to a rung, wait for resume (see ``ladder``)
    stage    ──▶ the weights' thread ──────────▶ receive into the shadow (see ``shadow``)

Waiting requests form one batch of up to ``max_rows`` samples, which an idle engine delays briefly to fill. Rounding
depends on batch shapes, hence timing; with ``alone`` a result depends on prompt, seed and weights only.
"""

import asyncio
import contextlib
import dataclasses
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple, Unpack

import numpy as np
import torch

from penstock.services.rollout.engines.engine import (
    EngineDied,
    GeneratedGroup,
    GeneratedSample,
    GenerationRequest,
    SwapReport,
    UpdateMode,
)
from penstock.services.rollout.engines.transformers import inbox
from penstock.services.rollout.engines.transformers.decoding import Batch, Tokens
from penstock.services.rollout.engines.transformers.inbox import (
    Close,
    Item,
    Reply,
    Request,
    Resume,
    ScoreRequest,
    Suspend,
    Swap,
)
from penstock.services.rollout.engines.transformers.ladder import Ladder
from penstock.services.rollout.engines.transformers.loading import OpenedModel
from penstock.services.rollout.engines.transformers.shadow import Shadow
from penstock.shared.bus.messages import Float32Array, Int32Array, PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.model.logits import logprobs
from penstock.shared.peers.handshake import Secret
from penstock.shared.process.memory_timeline import Held
from penstock.shared.weights.transport.offer import Offer
from penstock.shared.weights.transport.place import DeviceLocation, boot_id, plain_uuid

GATHER_S = 0.004
"""Time without further requests after which an idle engine starts."""

_MEASURE_S = 1.0
"""Between measurements of memory while decoding."""

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")


class TransformersEngine:
    """An :class:`Engine` on a transformers model.

    Args:
        opened: owned by the engine from now on.
        max_rows: maximum samples per batch.
        alone: one request per batch (``run.deterministic = "run"``).
        threads: torch's CPU threads; 0: its default.
        host: address for replicas' pulls; empty: none.
        drain: swap only after the running batch.
    """

    def __init__(
        self,
        opened: OpenedModel,
        *,
        max_rows: int,
        alone: bool = False,
        threads: int = 0,
        host: str = "",
        secret: Secret = bytes,
        deadline_s: float = 30.0,
        drain: bool = False,
    ) -> None:
        self._opened = opened
        self._max_rows = max_rows
        self._alone = alone
        self._threads = threads
        self._drain = drain
        self._shadow = Shadow(opened, host, deadline_s, secret)
        self._ladder = Ladder(opened, self._shadow)
        self._decoding: Batch | None = None
        self.drawn_tokens = 0
        self._measured_s = -math.inf
        self._receiving = ThreadPoolExecutor(1, "weights", self._set_threads)
        self._held_swaps: list[Swap] = []
        self._version: PolicyVersion | None = None
        self._inbox: queue.SimpleQueue[Item | Close] = queue.SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._closing = self._shut = False
        self._door = threading.Lock()
        self._death: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)
        self._thread.start()

    def update_by(self, mode: UpdateMode) -> None:
        """Swap between two decoding steps or after the running batch."""
        self._drain = mode == "drain"

    @property
    def version(self) -> PolicyVersion | None:
        return self._version

    def generate(self, request: GenerationRequest) -> Awaitable[GeneratedGroup]:
        """Return completions; more than ``max_rows`` are generated in parts."""
        if request.sampling.samples > self._max_rows:
            return self._in_parts(request)
        answer: asyncio.Future[GeneratedGroup] = self._loop.create_future()
        return self._ask(Request(request, answer), answer)

    async def _in_parts(self, request: GenerationRequest) -> GeneratedGroup:
        samples, parts = request.sampling.samples, list[GeneratedGroup]()
        for first in range(0, samples, self._max_rows):
            part = _part(request, first, min(self._max_rows, samples - first))
            answer: asyncio.Future[GeneratedGroup] = self._loop.create_future()
            parts.append(await self._ask(Request(part, answer), answer))
        made = tuple(sample for part in parts for sample in part.samples)
        return GeneratedGroup(made, parts[0].started_at_s, parts[-1].finished_at_s)

    @property
    def ranks(self) -> int:
        return 1

    @property
    def place(self) -> DeviceLocation:
        device = self._opened.device
        if device.type != "cuda":
            return DeviceLocation("cpu", (), boot_id())
        return DeviceLocation("cuda", (plain_uuid(torch.cuda.get_device_properties(device).uuid),), boot_id())

    @property
    def peer_address(self) -> str:
        return self._shadow.address

    @property
    def torn(self) -> bool:
        """Always False: swaps copy complete weights."""
        return False

    async def stage(self, offer: Offer) -> None:
        self._shadow.begin()
        receiving = self._loop.run_in_executor(self._receiving, self._shadow.receive, offer)
        try:
            await asyncio.shield(receiving)
        except asyncio.CancelledError:
            self._shadow.abort()
            await asyncio.gather(receiving, return_exceptions=True)
            raise

    async def swap(self, version: PolicyVersion) -> SwapReport:
        answer: asyncio.Future[SwapReport] = self._loop.create_future()
        return await self._ask(Swap(version, answer), answer)

    async def logprobs(self, token_ids: Int32Array) -> Float32Array:
        answer: asyncio.Future[Float32Array] = self._loop.create_future()
        return await self._ask(ScoreRequest(token_ids, answer), answer)

    async def suspend(self, rung: int) -> None:
        answer: asyncio.Future[None] = self._loop.create_future()
        await self._ask(Suspend(rung, answer), answer)

    async def resume(self) -> None:
        answer: asyncio.Future[None] = self._loop.create_future()
        await self._ask(Resume(answer), answer)

    @property
    def memory(self) -> dict[str, float]:
        return self._ladder.memory

    @property
    def held(self) -> Sequence[Held]:
        return () if self._ladder.held is None else (self._ladder.held,)

    async def close(self) -> None:
        self._inbox.put(Close())
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._shadow.close)
        self._receiving.shutdown(wait=False)

    def _ask(self, item: Item, answer: "asyncio.Future[R]") -> "asyncio.Future[R]":
        with self._door:
            if not self._shut:
                self._inbox.put(item)
                return answer
        error = EngineDied(f"the engine's thread has ended: {self._death!r}")
        error.__cause__ = self._death
        answer.set_exception(error)
        return answer

    # ---------------------------------------------------------------- the engine's thread

    def _live(self) -> None:
        try:
            self._set_threads()
            with torch.inference_mode():
                while self._gather():
                    self._run(self._next_batch())
        except BaseException as error:  # noqa: BLE001 (the edge of this thread: whoever waits is told, and the process stops)
            self._death = error
        finally:
            self._tell_all()

    def _set_threads(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)

    def _gather(self) -> bool:
        self._swap_held()
        while (self._ladder.is_away or not self._waiting) and not self._closing:
            self._receive(self._inbox.get())
        rows = sum(entry.request.sampling.samples for entry in self._waiting)
        with contextlib.suppress(queue.Empty):
            while not self._closing and rows < self._max_rows:
                item = self._inbox.get(timeout=GATHER_S)
                self._receive(item)
                rows += item.request.sampling.samples if isinstance(item, Request) else 0
        return not self._closing

    def _poll(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._receive(self._inbox.get_nowait())

    def _receive(self, item: Item | Close) -> None:
        if isinstance(item, Request):
            self._waiting.append(item)
        elif isinstance(item, Swap) and self._drain and self._running and not self._ladder.is_empty:
            self._held_swaps.append(item)
        elif isinstance(item, Close):
            self._closing = True
        else:
            try:
                self._do(item)
            except BaseException as error:
                self._call(inbox.end, item.answer, error)
                raise

    def _do(self, item: Swap | ScoreRequest | Suspend | Resume) -> None:
        match item:
            case Swap():
                self._swap(item)
            case ScoreRequest():
                self._score(item)
            case Suspend():
                self._suspend(item)
            case Resume():
                self._ladder.resume()
                self._call(inbox.answer, item.answer, None)

    def _measure(self) -> None:
        self._measured_s = time.monotonic()
        self._ladder.measure(None if self._decoding is None else self._decoding.cache)

    def _suspend(self, item: Suspend) -> None:
        self._measure()
        self._ladder.is_paused = True
        if item.rung >= 1 and self._decoding is not None:
            self._decoding.drop_cache()
        if item.rung >= 2:
            self._ladder.drop_weights()
            self._version = None
        if item.rung >= 1:
            self._ladder.return_memory()
        self._call(inbox.answer, item.answer, None)

    def _next_batch(self) -> list[Request]:
        batch, rows = list[Request](), 0
        while self._waiting:
            asked = self._waiting[0]
            samples = asked.request.sampling.samples
            if batch and (self._alone or rows + samples > self._max_rows):
                break
            self._waiting.popleft()
            if not asked.answer.done():
                batch.append(asked)
                rows += samples
        return batch

    def _run(self, batch: list[Request]) -> None:
        if not batch:
            return
        self._running, started_at_s = batch, time.time()
        opened, tokens = self._opened, Tokens(self._opened.stop)
        requests = [asked.request for asked in batch]
        decoding = self._decoding = Batch(opened.model, requests, tokens, opened.device, opened.recorder)
        while not decoding.finished and self._wait_while_away():
            if self._version is None:
                raise EngineDied("expected weights before the first request: a bug")
            drawn_tokens = decoding.unfinished
            whole = decoding.step(self._version)
            self.drawn_tokens += drawn_tokens
            if time.monotonic() - self._measured_s > _MEASURE_S:
                self._measure()
            if whole:
                self._deliver(whole, started_at_s)
            self._poll()
            for place, asked in enumerate(batch):
                if asked.answer.cancelled():
                    decoding.drop(place)
        self._decoding = None
        if decoding.finished:
            self._running = []

    def _wait_while_away(self) -> bool:
        """Wait until the model can compute; return whether to continue."""
        while self._ladder.is_away and not self._closing:
            self._receive(self._inbox.get())
        return not self._closing

    def _deliver(self, whole: Sequence[tuple[int, tuple[GeneratedSample, ...]]], started_at_s: float) -> None:
        now_s = time.time()
        answers = [
            (self._running[place].answer, GeneratedGroup(samples, started_at_s, now_s)) for place, samples in whole
        ]
        self._call(inbox.answer_all, answers)

    def _swap_held(self) -> None:
        held, self._held_swaps = self._held_swaps, []
        for item in held:
            self._swap(item)

    def _swap(self, item: Swap) -> None:
        started_s = time.perf_counter()
        try:
            pairs = self._shadow.pairs(item.version)
        except WeightsError as error:
            self._call(inbox.refuse, item.answer, error)
            return
        torch._foreach_copy_([parameter for parameter, _ in pairs], [value for _, value in pairs])
        if self._opened.device.type == "cuda":
            torch.cuda.synchronize(self._opened.device)
        self._version, self._ladder.is_empty = item.version, False
        copied_bytes = sum(value.nbytes for _, value in pairs)
        self._call(inbox.answer, item.answer, SwapReport(time.perf_counter() - started_s, "copy", copied_bytes))

    def _score(self, item: ScoreRequest) -> None:
        if self._ladder.is_away:
            self._call(inbox.refuse, item.answer, WeightsError("expected a running engine, found it suspended"))
            return
        ids_1T = torch.tensor(item.token_ids, dtype=torch.long, device=self._opened.device).unsqueeze(0)
        positions_1T = torch.arange(ids_1T.shape[1], device=self._opened.device).unsqueeze(0)
        output = self._opened.model(
            input_ids=ids_1T,
            attention_mask=None,
            position_ids=positions_1T,
            past_key_values=None,
            use_cache=False,
            logits_to_keep=0,
        )
        temperature_T = torch.ones(ids_1T.shape[1] - 1, device=self._opened.device)
        logprobs_T = logprobs(output.logits[0, :-1], ids_1T[0, 1:], temperature_T)
        self._call(inbox.answer, item.answer, logprobs_T.cpu().numpy())

    def _tell_all(self) -> None:
        with self._door:
            self._shut = True
        ends: list[Reply] = [asked.answer for asked in (*self._running, *self._waiting)]
        ends += [held.answer for held in self._held_swaps]
        while not self._inbox.empty():
            item = self._inbox.get()
            if not isinstance(item, Close):
                ends.append(item.answer)
        for answer in ends:
            self._call(inbox.end, answer, self._death)

    def _call(self, callback: Callable[[Unpack[Arguments]], object], *arguments: *Arguments) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *arguments)


def _part(request: GenerationRequest, first: int, samples: int) -> GenerationRequest:
    sampling = dataclasses.replace(request.sampling, samples=samples)
    seed = request.seed
    if first:
        seed = int(np.random.SeedSequence([request.seed, first]).generate_state(1, np.uint64)[0])
    return dataclasses.replace(request, sampling=sampling, seed=seed)
