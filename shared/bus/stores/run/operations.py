"""Records of long-running commands, for polling."""

import dataclasses
import json
import logging
from collections.abc import Sequence
from enum import StrEnum

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import key
from penstock.shared.bus.messages import Json

log = logging.getLogger(__name__)

OPERATIONS = key("operations", "hash", "the newest 1,000 that ended", "id → an operation (JSON); next: the newest id")
_NEXT = "next"


class OperationState(StrEnum):
    """State of an operation."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """A long-running command."""

    id: int
    kind: str
    state: OperationState
    phase: str
    """Current phase, named by the kind."""
    detail: str
    request: dict[str, Json]
    result: dict[str, Json]
    created_at_s: float
    changed_at_s: float


class OperationStore:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def next_number(self) -> int:
        return int(await self._bus.write(OPERATIONS, "HINCRBY", _NEXT, 1))

    async def get(self, number: int) -> Operation | None:
        text = await self._bus.hget(OPERATIONS, str(number))
        return None if text is None else _read(text)

    async def all(self) -> list[Operation]:
        """Return all operations, newest first."""
        raw = await self._bus.hgetall(OPERATIONS)
        read = (_read(text) for name, text in raw.items() if name != _NEXT.encode())
        return sorted((each for each in read if each is not None), key=lambda operation: -operation.id)

    async def write(self, operation: Operation) -> None:
        await self._bus.write(OPERATIONS, "HSET", str(operation.id), json.dumps(dataclasses.asdict(operation)))

    async def forget(self, numbers: Sequence[int]) -> None:
        if numbers:
            await self._bus.write(OPERATIONS, "HDEL", *map(str, numbers))


def _read(text: bytes) -> Operation | None:
    try:
        fields = json.loads(text)
        return Operation(**{**fields, "state": OperationState(fields["state"])})
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        log.warning("unreadable operation skipped", extra={"error": repr(error)[:200]})
        return None
