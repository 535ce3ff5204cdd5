"""A service as a function of messages: take, handle, hand over, at most ``concurrency`` at a time.

::

    read ──▶ attempts > max? ──▶ lose or bury
      │            │
      │      handler(message) ──▶ result ──▶ hand over (dropped if another consumer was first)
      │            ├── TemporaryError ──▶ given back, tried again after a growing delay, counted as an attempt; after the
      │            │                      last one a sample is lost, if its group can be made without it, or buried
      │            ├── NotHere        ──▶ given back, for anybody at once, not counted
      │            ├── ShelfLost      ──▶ its group is generated again
      │            ├── PermanentError ──▶ bury
      │            ├── ENDS_PROCESS   ──▶ the process ends; what it held is suspect
      │            └── anything else  ──▶ a bug: logged with its traceback, then as TemporaryError
      ├── new samples of a group ──▶ ``together``: handed over as they end; what it leaves or fails on is handled alone
      ├── renew: the lease, every third of ``claim_after_s``; what is no longer ours is cancelled, and what an answer that
      │          never came brought is given back
      └── reclaim: what was given back, or held for ``claim_after_s`` by a consumer whose lease has ended; of the latter
                 no more than may begin at once: others have room, too

**Suspects**: entries held by a process that died or fell silent. Only deaths during attempts made alone count; there
the samples of one group are tried together.

Shutdown: stop taking; wait up to ``drain_s`` for held entries; cancel the rest and give it back uncounted.
"""

import asyncio
import dataclasses
import logging
import math
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, TypeVar

from prometheus_client import Counter

from penstock.shared.backoff import Backoff
from penstock.shared.bus.assembly import place_of
from penstock.shared.bus.bus import Bus, Delivery, EntryId
from penstock.shared.bus.claims import regenerate
from penstock.shared.bus.crowd import Crowd
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Prompt, RolloutGroup
from penstock.shared.bus.shares import consumers, pause_s, portion
from penstock.shared.bus.streams import Stream
from penstock.shared.errors import Fenced, NotHere, PermanentError, SettingsError, ShelfLost, StateLost, TemporaryError

log = logging.getLogger(__name__)

ENTRIES = Counter(
    "penstock_bus_entries_total",
    "Entries of a stream by what this process did with them: handed_over, late (another replica was first), retried, "
    "buried, lost (a sample, without which its group is made), given_back, reclaimed (taken over from a silent replica).",
    ["stream", "outcome"],
)
HANDLER_ERRORS = Counter(
    "penstock_handler_errors_total",
    "Exceptions of handlers that are bugs, by the stream of their entry. Each costs its group an attempt.",
    ["stream"],
)

ENDS_PROCESS = (MemoryError, StateLost, SettingsError, Fenced)
"""End the process if a handler raises them; others cost only the group."""
_ALONE_FROM = 2
_MOST_TOGETHER = 1024
"""Samples of one hand-over: a script has room for about 8,000 words."""
_SAMPLE = re.compile(r"0|[1-9][0-9]{0,8}")
_LOOK_S = 0.05
_ELSEWHERE_S = 0.05
"""Wait after which an entry that this consumer cannot handle is there for all."""
_AT_ONCE_S = 86_400.0
_ROUNDING_S = 0.005
"""The server counts idle time in milliseconds."""

Bug = Callable[[str, str], Awaitable[None]]
"""Receives the group, and the exception's text or why a sample is lost."""
HandOver = Callable[[RolloutGroup], Awaitable[None]]
Together = Callable[[Prompt, Sequence[int], HandOver], Awaitable[None]]
"""Generates samples of a group, and hands over those that ended together, as they end."""

In = TypeVar("In")
Out = TypeVar("Out")


@dataclasses.dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts and attempts of a worker."""

    claim_after_s: float = 30.0
    """Lease of a worker; entries of one that does not renew it are taken over after this."""
    max_attempts: int = 5
    retry_s: float = 0.5
    """First wait after a temporary failure; doubles up to ``claim_after_s``."""
    drain_s: float = 20.0
    """Maximum wait of a shutdown."""


@dataclasses.dataclass(slots=True)
class WorkCounts:
    """A worker's counts since its start."""

    handed_over: int = 0
    late: int = 0
    """Results dropped because another consumer was first."""
    retried: int = 0
    buried: int = 0
    lost: int = 0
    """Samples without which their groups are made."""
    given_back: int = 0
    reclaimed: int = 0
    last_error: str = ""

    def add(self, stream: Stream, outcome: str, entries: int = 1) -> None:
        setattr(self, outcome, getattr(self, outcome) + entries)
        ENTRIES.labels(stream.name, outcome).inc(entries)


class Worker(Generic[In, Out]):
    """Run ``handler`` over one stream until stopped.

    Args:
        last: handles an entry's last attempt; default: ``handler``.
        crowd: shared by the workers of one process.
        bug: receives exceptions that are bugs, and lost samples.
        together: handles new samples of one group that a read returned, of which each is an entry; what it does not
            hand over is handled one by one.
        unit: entries that belong together. A read takes a part of the room, in whole units, so that consumers share
            what arrives by the room that they have; 0: it takes as many as there is room for. Suspects are counted in
            units.
    """

    def __init__(
        self,
        bus: Bus,
        consumer: str,
        source: Stream,
        kind: type[In],
        output: Stream,
        handler: Callable[[In], Awaitable[Out]],
        concurrency: int,
        patience: Patience,
        taking: asyncio.Event | None = None,
        *,
        last: Callable[[In], Awaitable[Out]] | None = None,
        crowd: Crowd | None = None,
        bug: Bug | None = None,
        together: Together | None = None,
        unit: int = 0,
    ) -> None:
        self._bus = bus
        self._consumer = consumer
        self._source = source
        self._kind = kind
        self._output = output
        self._handler = handler
        self._last = last or handler
        self._concurrency = concurrency
        self._patience = patience
        self._taking = taking or _always()
        self._crowd = crowd or Crowd()
        self._bug = bug
        self._together = together
        self._unit = unit
        HANDLER_ERRORS.labels(source.name)  # a series that exists at 0 shows its first increment
        self._held: dict[EntryId, asyncio.Task[None]] = {}
        self._suspects: deque[Delivery[In]] = deque()
        self._tried: set[asyncio.Task[None]] = set()
        self._alone: set[EntryId] = set()
        self._leaving: set[EntryId] = set()
        """Handled, leaving the stream: renewals may not find them."""
        self._free = asyncio.Event()
        self._reclaim_at_s = 0.0
        self._pause_s = pause_s(0, patience.claim_after_s)
        self._broken: asyncio.Future[None] | None = None
        self.counts = WorkCounts()
        for outcome in ("handed_over", "late", "retried", "buried", "lost", "given_back", "reclaimed"):
            ENTRIES.labels(source.name, outcome)
        self.resting = False

    @property
    def held(self) -> int:
        """Number of entries being handled."""
        return len(self._held)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop`` is set, then drain. Raises Exception: one of ``ENDS_PROCESS``, or an error of the bus."""
        self._broken = asyncio.get_running_loop().create_future()
        loops: list[asyncio.Task[Any]] = [asyncio.create_task(self._take()), asyncio.create_task(self._keep())]
        stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait())
        try:
            waited: list[asyncio.Future[Any]] = [*loops, stopping, self._broken]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            await _cancel([loops[0]])
            if not self._broken.done():
                await self._drain()
        finally:
            await _cancel([stopping, *loops])
            await self._release()
        for finished in (*loops, self._broken):
            if finished.done() and not finished.cancelled() and (error := finished.exception()) is not None:
                raise error

    async def _take(self) -> None:
        async for delivery in self._bus.own(self._source, self._kind, self._consumer, suspect=True):
            self._suspects.append(delivery)
        while True:
            room = await self._room()
            self.resting = not self._taking.is_set()
            await self._taking.wait()
            self.resting = False
            if self._may_try():
                await self._try(self._next_suspects())
                continue
            free, now_s = room - len(self._suspects), time.monotonic()
            if free > 0 and now_s >= self._reclaim_at_s:
                self._reclaim_at_s = now_s + self._pause_s
                if deliveries := await self._reclaim(free):
                    self._reclaim_at_s = 0.0
            else:
                block_s = _LOOK_S if self._suspects else max(_LOOK_S, min(self._pause_s, self._reclaim_at_s - now_s))
                count = portion(room, self._unit)
                deliveries = await self._bus.read(self._source, self._kind, self._consumer, count, block_s)
            for of_group in self._by_group(deliveries):
                if len(of_group) > 1:
                    self._start_together(of_group)
                elif of_group[0].crashes:
                    self._suspects.append(of_group[0])
                else:
                    await self._start(of_group)

    def _by_group(self, deliveries: Sequence[Delivery[In]]) -> list[list[Delivery[In]]]:
        """Return the new samples of each group together, and all other entries alone."""
        alone: list[list[Delivery[In]]] = []
        together: dict[str, dict[str, Delivery[In]]] = {}
        for delivery in deliveries:
            samples = together.setdefault(delivery.group_id, {})
            if self._is_new_sample(delivery) and delivery.part not in samples and len(samples) < _MOST_TOGETHER:
                samples[delivery.part] = delivery
            else:
                alone.append([delivery])
        return [*alone, *(list(samples.values()) for samples in together.values() if samples)]

    def _is_new_sample(self, delivery: Delivery[In]) -> bool:
        new = delivery.attempts == 1 and not delivery.crashes and delivery.entry_id not in self._held
        return self._together is not None and new and _SAMPLE.fullmatch(delivery.part) is not None

    def _may_try(self) -> bool:
        """Whether the next suspect may begin: few at a time."""
        if not self._suspects:
            return False
        return not self._tried if self._suspects[0].crashes >= _ALONE_FROM else self._places > 0

    @property
    def _places(self) -> int:
        """How many suspects may begin now."""
        unit = max(1, self._unit)
        return max(1, math.isqrt(self._concurrency // unit)) * unit - len(self._tried)

    def _next_suspects(self) -> list[Delivery[In]]:
        """Return the next suspect; if it is tried alone, with the other samples of its group."""
        first = self._suspects.popleft()
        if first.crashes < _ALONE_FROM or not _SAMPLE.fullmatch(first.part):
            return [first]
        others, rest = list[Delivery[In]](), deque[Delivery[In]]()
        for suspect in self._suspects:
            is_of_group = suspect.group_id == first.group_id and suspect.crashes >= _ALONE_FROM
            (others if is_of_group and _SAMPLE.fullmatch(suspect.part) else rest).append(suspect)
        self._suspects = rest
        return [first, *others]

    async def _try(self, suspects: Sequence[Delivery[In]]) -> None:
        if (task := await self._start(suspects)) is not None:
            self._tried.add(task)
            task.add_done_callback(self._tried.discard)

    async def _reclaim(self, room: int) -> list[Delivery[In]]:
        after_s, suspects = self._patience.claim_after_s, max(0, self._places - len(self._suspects))
        reclaimed = await self._bus.reclaim(self._source, self._kind, self._consumer, after_s, room, suspects=suspects)
        self.counts.add(self._source, "reclaimed", len(reclaimed))
        known = self._held.keys() | {delivery.entry_id for delivery in self._suspects}
        return [delivery for delivery in reclaimed if delivery.entry_id not in known]

    async def _room(self) -> int:
        while len(self._held) >= self._concurrency:
            self._free.clear()
            await self._free.wait()
        return self._concurrency - len(self._held)

    async def _start(self, deliveries: Sequence[Delivery[In]]) -> asyncio.Task[None] | None:
        """Start an entry, or suspects of one group that are tried alone."""
        deliveries = [delivery for delivery in deliveries if delivery.entry_id not in self._held]
        most = self._patience.max_attempts
        for delivery in [delivery for delivery in deliveries if delivery.attempts > most]:
            cause = await self._bus.cause(delivery) or "its process died each time without a message"
            if not await self._give_up(delivery, f"failed {delivery.attempts - 1} times: {cause}"):
                return None  # the group has ended
        deliveries = [delivery for delivery in deliveries if delivery.attempts <= most]
        if not deliveries:
            return None
        is_alone = deliveries[0].crashes >= _ALONE_FROM
        return self._hold(
            deliveries, self._handle_alone(deliveries) if is_alone else self._handle_beside(deliveries[0])
        )

    def _start_together(self, deliveries: Sequence[Delivery[In]]) -> None:
        self._hold(deliveries, self._handle_together(deliveries))

    def _hold(self, deliveries: Sequence[Delivery[In]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{self._source.name}:{deliveries[0].entry_id}")
        for delivery in deliveries:
            self._held[delivery.entry_id] = task
        task.add_done_callback(lambda done: self._finished([delivery.entry_id for delivery in deliveries], done))
        return task

    async def _handle_beside(self, delivery: Delivery[In]) -> None:
        async with self._crowd.shared():
            await self._handle(delivery)

    async def _handle_alone(self, deliveries: Sequence[Delivery[In]]) -> None:
        async with self._crowd.alone():
            ours = [delivery for delivery in deliveries if await self._bus.try_alone(delivery, self._consumer)]
            lost = {delivery.entry_id for delivery in deliveries} - {delivery.entry_id for delivery in ours}
            self._let_go(list(lost), asyncio.current_task())
            if not ours:
                return
            self._alone = {delivery.entry_id for delivery in ours}
            words = {"stream": self._source.name, "group": ours[0].group_id, "entries": len(ours)}
            log.warning("suspect tried alone", extra=words)
            await asyncio.wait([self._hold([delivery], self._handle_one_alone(delivery)) for delivery in ours])

    async def _handle_one_alone(self, delivery: Delivery[In]) -> None:
        await self._handle(delivery)
        self._alone.discard(delivery.entry_id)  # if cancelled: by ``hand_back``

    async def _handle_together(self, deliveries: Sequence[Delivery[In]]) -> None:
        assert self._together is not None
        task, left = asyncio.current_task(), {delivery.part: delivery for delivery in deliveries}

        async def hand_over(part: RolloutGroup) -> None:
            ended = [left[str(place)] for place in part.places]
            entries = [delivery.entry_id for delivery in ended]
            self._leaving.update(entries)
            handed_over = await self._bus.hand_over_part(ended, self._output, part)
            self.counts.add(self._source, "handed_over", handed_over)
            if late := len(ended) - handed_over:
                self.counts.add(self._source, "late", late)
                log.info("late results dropped", extra={"stream": self._source.name, "samples": late})
            for delivery in ended:
                del left[delivery.part]
            self._let_go(entries, task)

        try:
            async with self._crowd.shared():
                await self._together(*_samples(deliveries), hand_over)
        except ENDS_PROCESS as error:
            for delivery in left.values():
                await self._bus.note_cause(delivery, repr(error))
            raise
        except NotHere as error:
            await self._leave(list(left.values()), str(error))
            return
        except Exception as error:  # noqa: BLE001 (what is left is handled again, and its own error counted)
            log.warning("samples will be tried alone", extra={"group": deliveries[0].group_id, "reason": _words(error)})
        self._leaving.difference_update(delivery.entry_id for delivery in left.values())
        for delivery in left.values():
            self._hold([delivery], self._handle_beside(delivery))

    def _finished(self, entries: Sequence[EntryId], task: asyncio.Task[None]) -> None:
        self._let_go(entries, task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    def _let_go(self, entries: Sequence[EntryId], task: asyncio.Task[None] | None) -> None:
        """Make room for others, unless a later task handles an entry."""
        for entry_id in entries:
            if self._held.get(entry_id) is task:
                del self._held[entry_id]
                self._leaving.discard(entry_id)
        self._free.set()

    async def _handle(self, delivery: Delivery[In]) -> None:
        handler = self._last if delivery.attempts >= self._patience.max_attempts else self._handler
        try:
            whole = dataclasses.replace(delivery, data=await self._bus.whole(delivery.data))
            result = wire.encode(await handler(whole.message()))
        except ShelfLost as error:
            self._leaving.add(delivery.entry_id)
            await regenerate(self._bus, delivery, error)
        except PermanentError as error:
            await self._bury(delivery, str(error))
        except NotHere as error:
            await self._leave([delivery], str(error))
        except TemporaryError as error:
            await self._retry_later(delivery, str(error))
        except ENDS_PROCESS as error:
            await self._bus.note_cause(delivery, repr(error))
            raise
        except Exception as error:  # noqa: BLE001 (the edge of a handler: what it did not foresee costs its group alone)
            await self._note_bug(delivery, error)
            await self._retry_later(delivery, _words(error))
        else:
            await self._hand_over(delivery, result)

    async def _hand_over(self, delivery: Delivery[In], result: bytes) -> None:
        self._leaving.add(delivery.entry_id)
        try:
            handed_over = await self._bus.hand_over(delivery, self._output, result)
        except PermanentError as error:  # the result is longer than the server takes
            await self._give_up(delivery, str(error))
            return
        self.counts.add(self._source, "handed_over" if handed_over else "late")
        if not handed_over:
            log.info("late result dropped", extra={"stream": self._source.name, "entry": delivery.entry_id})

    async def _note_bug(self, delivery: Delivery[In], error: Exception) -> None:
        HANDLER_ERRORS.labels(self._source.name).inc()
        log.error("bug in a handler", exc_info=error, extra={"stream": self._source.name, "group": delivery.group_id})
        if self._bug is not None:
            await self._bug(delivery.group_id, _words(error))

    async def _give_up(self, delivery: Delivery[In], reason: str) -> bool:
        """Lose a sample, or bury the entry and its group; return whether the group continues."""
        self._leaving.add(delivery.entry_id)
        lost = None
        if _SAMPLE.fullmatch(delivery.part):
            lost = await self._bus.lose(delivery, self._output, reason)
        if lost is None:
            await self._bury(delivery, reason)
            return False
        self._leaving.discard(delivery.entry_id)
        if lost:
            self.counts.add(self._source, "lost")
            self.counts.last_error = reason
            words = {"group": delivery.group_id, "sample": delivery.part, "reason": reason}
            log.error("sample lost", extra={"stream": self._source.name, **words})
            if self._bug is not None:
                await self._bug(delivery.group_id, f"sample {delivery.part} is lost: {reason}")
        return True

    async def _bury(self, delivery: Delivery[In], reason: str) -> None:
        self.counts.last_error = reason
        log.error("entry buried", extra={"stream": self._source.name, "group": delivery.group_id, "reason": reason})
        self._leaving.add(delivery.entry_id)
        try:
            await self._bus.bury(delivery, reason)
            self.counts.add(self._source, "buried")
        finally:
            self._leaving.discard(delivery.entry_id)

    async def _retry_later(self, delivery: Delivery[In], reason: str) -> None:
        self.counts.add(self._source, "retried")
        self.counts.last_error = reason
        if delivery.attempts >= self._patience.max_attempts:
            await self._give_up(delivery, reason)
            return
        await self._bus.note_cause(delivery, reason)
        wait_s = Backoff(self._patience.retry_s, self._patience.claim_after_s).wait_s(delivery.attempts)
        words = {"stream": self._source.name, "group": delivery.group_id, "reason": reason, "wait_s": wait_s}
        log.warning("entry will be tried again", extra=words)
        await self._give_back(delivery, wait_s, counted=True)

    async def _leave(self, deliveries: Sequence[Delivery[In]], reason: str) -> None:
        """Give back what another consumer can handle now, and this one once ``taking`` says so."""
        self.counts.add(self._source, "given_back", len(deliveries))
        log.debug("left to others", extra={"stream": self._source.name, "entries": len(deliveries), "reason": reason})
        for delivery in deliveries:
            self._let_go([delivery.entry_id], asyncio.current_task())  # this consumer may take it again at once
            await self._give_back(delivery, _ELSEWHERE_S, counted=False)

    async def _give_back(self, delivery: Delivery[In], wait_s: float, *, counted: bool) -> None:
        idle_s = max(0.0, self._patience.claim_after_s - wait_s)
        uncounted = int(not counted) + int(delivery.entry_id in self._alone)
        await self._bus.give_back(self._source, self._consumer, delivery.entry_id, idle_s=idle_s, uncounted=uncounted)
        self._reclaim_at_s = min(self._reclaim_at_s, time.monotonic() + wait_s + _ROUNDING_S)

    async def _keep(self) -> None:
        unknown = set[EntryId]()
        """Ours at the last renewal, and not held: an answer is on its way, or was lost with its connection."""
        while True:
            self._pause_s = pause_s(await consumers(self._bus, self._source), self._patience.claim_after_s)
            await asyncio.sleep(self._patience.claim_after_s / 3)
            held = {entry_id: task for entry_id, task in self._held.items() if entry_id not in self._leaving}
            suspects = {delivery.entry_id for delivery in self._suspects}
            if not self._held and not suspects:
                continue  # what it holds without knowing is taken over, as its lease ends
            ours = await self._bus.renew(self._source, self._consumer, self._patience.claim_after_s)
            known = self._held.keys() | {delivery.entry_id for delivery in self._suspects}
            for entry_id in unknown & (unknown := ours - known):
                await self._bus.give_back(self._source, self._consumer, entry_id, idle_s=_AT_ONCE_S, uncounted=1)
            gone = suspects - ours
            self._suspects = deque(delivery for delivery in self._suspects if delivery.entry_id not in gone)
            lost = {
                entry_id
                for entry_id in held.keys() - ours - self._leaving
                if self._held.get(entry_id) is held[entry_id]
            }
            kept = {task for entry_id, task in self._held.items() if entry_id not in lost}
            for entry_id in lost:
                log.warning("entry was taken over", extra={"stream": self._source.name, "entry": entry_id})
            for task in {held[entry_id] for entry_id in lost} - kept:
                task.cancel()

    async def hand_back(self) -> None:
        """Give back what is held, uncounted, for others to take at once; call it while ``taking`` is not set."""
        await _cancel(self._held.values())
        self._suspects.clear()
        while self._alone:
            await self._bus.give_back(self._source, self._consumer, self._alone.pop(), idle_s=_AT_ONCE_S, uncounted=2)
        given_back = await self._bus.give_all_back(self._source, self._consumer)
        self.counts.add(self._source, "given_back", given_back)

    async def _drain(self) -> None:
        if self._held:
            await asyncio.wait(self._held.values(), timeout=self._patience.drain_s)

    async def _release(self) -> None:
        await _cancel(self._held.values())
        if self._broken is not None and self._broken.done():
            await self._bus.leave_suspects(self._source, self._consumer)
        else:
            await self.hand_back()


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _always() -> asyncio.Event:
    taking = asyncio.Event()
    taking.set()
    return taking


def _samples(deliveries: Sequence[Delivery[Any]]) -> tuple[Prompt, list[int]]:
    """Return the prompt of entries of one group, and their samples. Raises MessageError."""
    prompt = dataclasses.replace(deliveries[0], part="all").message()
    return prompt, [place_of(prompt, delivery.part) for delivery in deliveries]


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = set(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
