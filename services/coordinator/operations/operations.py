"""Long-running commands: records that clients poll, and the tasks that do the work.

The next leader calls the handler again with the record, so handlers are idempotent. Repeating a command in progress
returns the same operation.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Json
from penstock.shared.bus.stores.run.operations import Operation, OperationState, OperationStore
from penstock.shared.errors import PenstockError

log = logging.getLogger(__name__)

_KEPT = 1000
_LOOK_S = 2.0


class StateConflict(PenstockError):
    """A command does not fit the run's state."""


@dataclasses.dataclass(frozen=True, slots=True)
class OperationOutcome:
    state: OperationState
    detail: str
    result: dict[str, Json] = dataclasses.field(default_factory=dict)


Report = Callable[[str, str], Awaitable[None]]
"""Record (phase, detail)."""
Handler = Callable[[Operation, Report], Awaitable[OperationOutcome]]


class Operations:
    """``handlers``: by kind. An exception fails the operation and is re-raised."""

    def __init__(self, bus: Bus, handlers: Mapping[str, Handler]) -> None:
        self._store = OperationStore(bus)
        self._handlers = handlers
        self._working: set[int] = set()
        self._wake = asyncio.Event()

    async def begin(self, kind: str, phase: str, request: Mapping[str, Json]) -> Operation:
        assert kind in self._handlers
        known = await self._store.all()
        for record in known:
            if record.state is OperationState.RUNNING and (record.kind, record.request) == (kind, dict(request)):
                return record
        number = await self._store.next_number()
        now_s = time.time()
        made = Operation(number, kind, OperationState.RUNNING, phase, "", dict(request), {}, now_s, now_s)
        await self._store.write(made)
        await self._store.forget([old.id for old in known if old.state is not OperationState.RUNNING][_KEPT:])
        self._wake.set()
        return made

    async def get(self, number: int) -> Operation | None:
        return await self._store.get(number)

    async def all(self) -> list[Operation]:
        """Return every kept operation, newest first."""
        return await self._store.all()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                for operation in await self._store.all():
                    if operation.state is OperationState.RUNNING and operation.id not in self._working:
                        self._working.add(operation.id)
                        working = tasks.create_task(self._work(operation))
                        working.add_done_callback(functools.partial(self._forget, operation.id))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._wake.wait()
                self._wake.clear()

    def _forget(self, number: int, _: object) -> None:
        self._working.discard(number)

    async def give_up(self, detail: str) -> None:
        for operation in await self._store.all():
            if operation.state is OperationState.RUNNING:
                await self._end(operation, OperationOutcome(OperationState.FAILED, detail))

    async def _work(self, operation: Operation) -> None:
        now = operation

        async def report(phase: str, detail: str) -> None:
            nonlocal now
            if (now.phase, now.detail) != (phase, detail):
                now = dataclasses.replace(now, phase=phase, detail=detail, changed_at_s=time.time())
                await self._store.write(now)

        handler = self._handlers.get(operation.kind)
        try:
            if handler is None:
                outcome = OperationOutcome(
                    OperationState.FAILED, f"this version of Penstock does not know the operation {operation.kind!r}"
                )
            else:
                outcome = await handler(operation, report)
        except Exception as error:
            await self._end(now, OperationOutcome(OperationState.FAILED, str(error) or repr(error)))
            raise
        else:
            await self._end(now, outcome)

    async def _end(self, now: Operation, outcome: OperationOutcome) -> None:
        ended = dataclasses.replace(
            now, state=outcome.state, detail=outcome.detail, result=outcome.result, changed_at_s=time.time()
        )
        await self._store.write(ended)
        log.info("operation ended", extra={"operation": ended.id, "kind": ended.kind, "state": ended.state.value})
