"""Batch samples of all waiting groups into forward passes in a separate thread.

::

    run(items) ──▶ waiting ──▶ sorted by length, cut by tokens; the batch with the oldest item first
                                 └── compute, in a thread
                                       ├── NoRoom ──▶ halve and retry; a single item: its caller gets NoRoom
                                       └── anything else ──▶ a bug: every caller gets it
    the end of a turn (``turns``) ──▶ offload             next work ──▶ restore

A batch costs ``longest × count`` tokens, as padded. Items of cancelled callers are dropped. torch releases the GIL
while it computes.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from prometheus_client import Counter, Gauge, Histogram

from penstock.services.reward.models.call_watch import ThreadClock, Work
from penstock.services.reward.models.turns import Turns
from penstock.shared.errors import PenstockError, StateLost
from penstock.shared.settings.rewards.models import ModelsSettings

log = logging.getLogger(__name__)

WAIT_S = 0.01
"""Samples of a group arrive together, and a forward pass takes longer than this."""
_CLOSE_S = 30.0
"""For a call of the model that is under way; the process's end does not wait for one that hangs."""
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
TOKENS = Counter("penstock_reward_model_tokens_total", "Tokens that a model read, padding left out.", ["scorer"])
PADDING = Counter("penstock_reward_model_padding_tokens_total", "Padding that a model read.", ["scorer"])
BUSY = Counter("penstock_reward_model_busy_seconds_total", "Time that a model spent in forward passes.", ["scorer"])
FILL = Histogram(
    "penstock_reward_batch_fill_ratio",
    "Tokens of a forward pass, padding left out, as a share of batch_tokens.",
    ["scorer"],
    buckets=_SHARES,
)
WAITING = Gauge("penstock_reward_model_waiting_samples", "Samples that wait for a model.", ["scorer"])
OFFLOADS = Counter("penstock_reward_model_offloads_total", "Times that an idle model left its device.", ["scorer"])
NO_ROOM = Counter("penstock_reward_model_out_of_memory_total", "Forward passes that did not fit.", ["scorer"])


class NoRoom(PenstockError):
    """A forward pass does not fit into device memory now."""


class HasTokens(Protocol):
    @property
    def tokens(self) -> int:
        """Length in tokens."""


Item = TypeVar("Item", bound=HasTokens)
ItemIn = TypeVar("ItemIn", contravariant=True)
Result = TypeVar("Result")
ResultOut = TypeVar("ResultOut", covariant=True)
Done = TypeVar("Done")


class Computation(Protocol[ItemIn, ResultOut]):
    """The model; called from the batcher's thread only, except ``on_cpu``."""

    @property
    def on_cpu(self) -> bool:
        """Whether the calling thread computes."""

    def compute(self, batch: Sequence[ItemIn]) -> Sequence[ResultOut]:
        """Return a result for each item. Raises NoRoom if they do not fit together."""

    def offload(self) -> None:
        """Free the device."""

    def restore(self) -> None:
        """Move back to the device. Raises NoRoom."""


@dataclasses.dataclass(slots=True, eq=False)
class _Waiting(Generic[Item, Result]):
    item: Item
    since_s: float
    result: "asyncio.Future[Result]"

    def fail(self, error: NoRoom) -> None:
        if not self.result.done():
            self.result.set_exception(error)

    def succeed(self, result: Result) -> None:
        if not self.result.done():
            self.result.set_result(result)


class Batcher(Generic[Item, Result]):
    """Run ``computation`` over the items of all callers."""

    def __init__(
        self,
        computation: Computation[Item, Result],
        work: ModelsSettings,
        scorer: str,
        wait_s: float = WAIT_S,
        turns: Turns | None = None,
    ) -> None:
        self._computation = computation
        self._turns = turns or Turns()
        self._work_settings = work
        self._wait_s = wait_s
        self._scorer = scorer
        NO_ROOM.labels(scorer)  # create the series at 0, so that a rate sees its first increase
        self._waiting: list[_Waiting[Item, Result]] = []
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=scorer)
        self._away = False
        self._working: asyncio.Task[None] | None = None
        WAITING.labels(scorer).set_function(lambda: len(self._waiting))

    def start(self) -> None:
        self._turns.join(self)
        self._working = asyncio.create_task(self._work(), name=f"{self._scorer}:batches")

    async def close(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])
        self._away = True  # a turn that ends now has nothing to free
        await asyncio.wait([asyncio.create_task(asyncio.to_thread(self._thread.shutdown))], timeout=_CLOSE_S)

    async def run(self, items: Sequence[Item]) -> list[Result]:
        """Raises NoRoom: an item does not fit even alone; StateLost: a forward pass failed, so the device may be gone."""
        assert self._working is not None, "start() comes first"
        now_s, loop = time.monotonic(), asyncio.get_running_loop()
        asked = [_Waiting[Item, Result](item, now_s, loop.create_future()) for item in items]
        self._waiting += asked
        self._arrived.set()
        results = asyncio.gather(*(request.result for request in asked))
        results.add_done_callback(_look_at)
        first: list[asyncio.Future[Any]] = [results, self._working]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not results.done():
                error = self._working.exception()
                raise StateLost(f"the model of scorer {self._scorer!r} failed: {error!r}") from error
            return await results
        finally:
            results.cancel()

    async def leave(self) -> None:
        """Free the device until the next forward pass."""
        if not self._away:
            await self._in_thread("move to host memory", self._computation.offload)
            self._away = True
            OFFLOADS.labels(self._scorer).inc()

    async def _work(self) -> None:
        while True:
            await self._some()
            async with self._turns.computing():
                await self._enough()
                await self._compute(self._take())

    async def _some(self) -> None:
        while not self._still_wanted():
            await self._next_arrival()

    async def _enough(self) -> None:
        work = self._work_settings
        while waiting := self._still_wanted():
            left_s = waiting[0].since_s + self._wait_s - time.monotonic()
            if left_s <= 0 or sum(request.item.tokens for request in waiting) >= work.batch_tokens:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._next_arrival()

    async def _next_arrival(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    def _still_wanted(self) -> list[_Waiting[Item, Result]]:
        """Oldest first, without those of cancelled callers."""
        self._waiting = [request for request in self._waiting if not request.result.done()]
        return self._waiting

    def _take(self) -> list[_Waiting[Item, Result]]:
        waiting = self._still_wanted()
        if not waiting:
            return []
        cuts = cut([request.item.tokens for request in waiting], self._work_settings.batch_tokens)
        chosen = set(next(places for places in cuts if 0 in places))
        self._waiting = [request for place, request in enumerate(waiting) if place not in chosen]
        return [request for place, request in enumerate(waiting) if place in chosen]

    async def _compute(self, batch: list[_Waiting[Item, Result]]) -> None:
        parts = deque([batch] if batch and await self._is_there(batch) else [])
        while parts:
            part = parts.popleft()
            try:
                results = await self._forward([request.item for request in part])
            except NoRoom as error:
                NO_ROOM.labels(self._scorer).inc()
                parts.extendleft(reversed(self._smaller(part, error)))
            else:
                for request, result in zip(part, results, strict=True):
                    request.succeed(result)

    async def _is_there(self, batch: list[_Waiting[Item, Result]]) -> bool:
        if self._away:
            started_s = time.monotonic()
            try:
                await self._in_thread("move to the device", self._computation.restore)
            except NoRoom as error:
                NO_ROOM.labels(self._scorer).inc()
                if self._turns.is_shared:  # another holder did not free it: the group is not to blame
                    raise
                for request in batch:
                    request.fail(NoRoom(f"no memory for the model itself: {error}"))
                return False
            self._away = False
            self._turns.note_moved(time.monotonic() - started_s)
        return True

    def _smaller(self, part: list[_Waiting[Item, Result]], error: NoRoom) -> list[list[_Waiting[Item, Result]]]:
        tokens = max(request.item.tokens for request in part)
        log.warning("no memory", extra={"scorer": self._scorer, "samples": len(part), "tokens": tokens})
        if len(part) == 1:
            part[0].fail(NoRoom(f"no memory for a sample of {tokens} tokens: {error}"))
            return []
        middle = len(part) // 2
        return [part[:middle], part[middle:]]

    async def _forward(self, items: list[Item]) -> Sequence[Result]:
        started_s = time.monotonic()
        results = await self._in_thread("forward pass", lambda: self._computation.compute(items))
        BUSY.labels(self._scorer).inc(time.monotonic() - started_s)
        tokens = sum(item.tokens for item in items)
        TOKENS.labels(self._scorer).inc(tokens)
        PADDING.labels(self._scorer).inc(len(items) * max(item.tokens for item in items) - tokens)
        FILL.labels(self._scorer).observe(tokens / self._work_settings.batch_tokens)
        return results

    async def _in_thread(self, work: Work, call: Callable[[], Done]) -> Done:
        clock = ThreadClock()

        def begun() -> Done:
            clock.begin()
            return call()

        with self._turns.watch.working(self._scorer, work, clock if self._computation.on_cpu else None):
            return await asyncio.get_running_loop().run_in_executor(self._thread, begun)


def _look_at(done: "asyncio.Future[Any]") -> None:
    """Retrieve an error, so that asyncio does not log it."""
    if not done.cancelled():
        done.exception()


def cut(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Return indices in batches of at most ``batch_tokens`` (longest × count), longest first.

    >>> cut([3, 8, 4, 8], 16)
    [[1, 3], [2, 0]]
    """
    cuts: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        longest = lengths[cuts[-1][0]] if cuts else 0
        if cuts and longest * (len(cuts[-1]) + 1) <= batch_tokens:
            cuts[-1].append(place)
        else:
            cuts.append([place])
    return cuts
