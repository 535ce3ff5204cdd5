"""Claims: what the bus carries instead of a payload that shelves keep (``penstock.shared.shelf``).

::

    rollouts      [Prompt, part, Claim, …]     a part, or a Claim for it, of each sample
    experience    Experience, or a Claim       the Claim has the group's prompt, so that it can be generated again

Readers see whole payloads (:meth:`Claims.whole`). A group of which a payload has no copy left is generated again.
"""

import asyncio
import dataclasses
import logging
import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Protocol

import msgpack
from prometheus_client import Counter

from penstock.shared.bus.client.commands import Commands
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.encoding.validation import FieldLimits
from penstock.shared.bus.encoding.wire import message, record
from penstock.shared.bus.messages import Experience, Prompt, RolloutGroup
from penstock.shared.bus.streams import EXPERIENCE, ROLLOUTS, Stream
from penstock.shared.errors import MessageError, ShelfLost

log = logging.getLogger(__name__)

UNAVAILABLE = Counter(
    "penstock_shelf_unavailable_total", "Groups generated again because no copy of a payload of theirs was left."
)
MOST_LOSSES = 20
"""After which a group without its payload is buried."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MARK = b"\xa4kind\xa5claim"
_ARRAY = b"\xdd"
_STREAMS = (ROLLOUTS, EXPERIENCE, ROLLOUTS.dead, EXPERIENCE.dead)
_NAME = FieldLimits(length=1024)
_ID = FieldLimits(0, (1 << 53) - 1)


@record
@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """A replica with a copy. ``address``: where it served it when it took it, ``host:port``."""

    replica: Annotated[str, _NAME]
    address: Annotated[str, _NAME]


@message("claim", schema=1)
@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A payload of ``size`` bytes on shelves, by its SHA-256 in hex."""

    group_id: Annotated[int, _ID]
    digest: Annotated[str, _NAME]
    size: Annotated[int, _ID]
    holders: Annotated[tuple[Holder, ...], FieldLimits(length=4)]
    prompt: Annotated[bytes, FieldLimits(length=1 << 28)] = b""
    """The encoded prompt, unless it is beside the claim."""

    def check(self) -> None:
        """Raise ValueError for another digest than a SHA-256."""
        if _DIGEST.fullmatch(self.digest) is None:
            raise ValueError(f"expected a SHA-256 of 64 hexadecimal digits, found {self.digest[:80]!r}")


class Shelving(Protocol):
    """What a bus asks of its process's shelf."""

    def takes(self, size: int) -> bool:
        """Whether a payload of ``size`` bytes is kept on shelves."""

    async def put(self, payload: bytes, group_id: int, prompt: bytes = b"") -> Claim | None:
        """Keep a payload; None: there is no room for every copy, and the bus has to carry it."""

    async def fetch(self, claim: Claim) -> bytes:
        """Return a payload; raises ShelfLost."""


class Claims(Commands):
    """The part of a bus that puts large payloads on shelves, and reads them from there."""

    shelf: Shelving | None = None

    async def shelved(self, payload: bytes, delivery: Any, output: Stream) -> bytes:
        """Return what ``output`` carries for the result of ``delivery``: the payload, or its claim."""
        if self.shelf is None or output not in (ROLLOUTS, EXPERIENCE) or not self.shelf.takes(len(payload)):
            return payload
        prompt = b""
        if not delivery.part.isdecimal():
            group = (
                wire.unpack(payload, Experience)["group"]
                if output is EXPERIENCE
                else wire.unpack(payload, RolloutGroup)
            )
            prompt = msgpack.packb({**group["prompt"], "kind": "prompt", "schema": 2})
        claim = await self.shelf.put(payload, int(delivery.group_id), prompt)
        return payload if claim is None else wire.encode(claim)

    async def claimed(self, payload: bytes, group_id: int) -> bytes:
        """Keep a payload of a group on the shelf; return its encoded claim, or nothing if it has not every copy."""
        claim = await self.shelf.put(payload, group_id) if self.shelf is not None and payload else None
        return b"" if claim is None else wire.encode(claim)

    async def whole(self, data: bytes) -> bytes:
        """Return what an entry carries, with payloads in place of their claims.

        Raises:
            ShelfLost: no copy of one is left.
            MessageError: a claim is malformed.
        """
        if is_claim(data):
            return await self._fetched(data)
        pieces = _pieces(data)
        if not any(map(is_claim, pieces)):
            return data
        fetched = await asyncio.gather(*(self._fetched(piece) for piece in pieces), return_exceptions=True)
        for error in fetched:
            if isinstance(error, BaseException):
                raise error
        return bytes(msgpack.packb(fetched))

    async def needed(self, groups: Collection[int]) -> frozenset[int] | None:
        """Return those of ``groups`` in flight, in the journal or among dead letters; None: the bus has lost the run, or has none."""
        exists, ids = await self.script("shelved", streams=_STREAMS, groups=sorted(groups))
        return frozenset(map(int, ids)) if exists else None

    async def _fetched(self, piece: bytes) -> bytes:
        if not is_claim(piece):
            return piece
        claim = wire.decode(piece, Claim)
        if self.shelf is None:
            raise ShelfLost("expected a shelf in a process that reads claims, found none")
        return await self.shelf.fetch(claim)


def is_claim(data: object) -> bool:
    """Whether ``data`` is an encoded claim."""
    return isinstance(data, bytes) and data[1 : 1 + len(_MARK)] == _MARK


def prompt_of(data: bytes) -> Prompt:
    """Return the prompt of an entry's group, from beside its claims. Raises MessageError."""
    pieces = _pieces(data)
    return wire.decode(wire.decode(data, Claim).prompt if is_claim(data) else pieces[0] if pieces else b"", Prompt)


def _pieces(data: bytes) -> list[Any]:
    """Return the prompt and the parts of a group that a script assembled; none if it is no such group."""
    if data[:1] != _ARRAY:
        return []
    try:
        return list(msgpack.unpackb(data))
    except (ValueError, msgpack.UnpackException):
        return []  # its reader says what is wrong


class _Groups(Protocol):
    async def bury(self, delivery: Any, reason: str) -> bool: ...

    async def requeue(self, delivery: Any, prompt: Prompt, kept: Sequence[bytes] = (), reason: str = "") -> bool: ...


async def regenerate(bus: _Groups, delivery: Any, error: ShelfLost) -> None:
    """Send the group of an entry whose payload is lost back to the stream of its prompt, counted; bury it if that does not help."""
    try:
        prompt = prompt_of(delivery.data)
        if str(prompt.group_id) != delivery.group_id:
            raise MessageError(f"expected the prompt of group {delivery.group_id[:40]!r}, found {prompt.group_id}'s")
    except MessageError as broken:
        await bus.bury(delivery, str(broken))
        return
    if prompt.losses >= MOST_LOSSES:
        await bus.bury(delivery, f"its payload was lost although it was generated again {MOST_LOSSES} times: {error}")
        return
    again = dataclasses.replace(prompt, requeues=prompt.requeues + 1, losses=prompt.losses + 1, sample=None)
    if await bus.requeue(delivery, again, reason="unavailable"):
        UNAVAILABLE.inc()
        log.warning("group will be generated again", extra={"group": delivery.group_id, "reason": str(error)})
