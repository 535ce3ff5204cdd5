"""Questions to the live policy, outside of training and of the ledger.

::

    API ── questions ──▶ every replica; the first that claims one answers it ── answers ──▶ API

Both streams are trimmed. A question whose replica dies is not asked again: its API request times out.
"""

import asyncio
import secrets
from collections.abc import Mapping

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import key
from penstock.shared.bus.messages import GroupId, Prompt, Purpose, RolloutGroup
from penstock.shared.bus.streams import ANSWERS, QUESTIONS
from penstock.shared.errors import MessageError, PermanentError

CLAIM = key("question:<id>", "string", "ten minutes", "replica that answers the question")
WITHIN_S = 120.0
"""Longest wait for an answer."""
_CLAIM_S = 600
_BLOCK_S = 1.0
_IDLE_S = 5.0
_MOST = 16
_LONGEST_REASON = 2000


def new_id() -> GroupId:
    return GroupId(secrets.randbits(52))


async def ask(bus: Bus, prompt: Prompt, within_s: float) -> RolloutGroup:
    """Return the live policy's completions of ``prompt``.

    Raises:
        PermanentError: the replica refused the prompt.
        TimeoutError: no answer within ``within_s``.
    """
    after = await newest_answer(bus)
    await bus.publish(QUESTIONS, prompt, str(prompt.group_id))
    async with asyncio.timeout(within_s):
        while True:
            for entry, fields in await bus.xread({ANSWERS: after}, _MOST, _BLOCK_S):
                after = entry
                if fields.get(b"id") == str(prompt.group_id).encode():
                    await bus.write(ANSWERS, "XDEL", entry)
                    return _answer(fields)


async def newest_answer(bus: Bus) -> str:
    """Return the newest answer's entry, or the stream's beginning."""
    newest = await bus.xrevrange(ANSWERS, count=1)
    return newest[0][0] if newest else "0-0"


def _answer(fields: Mapping[bytes, bytes]) -> RolloutGroup:
    if refusal := fields.get(b"refusal"):
        raise PermanentError(refusal[:_LONGEST_REASON].decode(errors="replace"))
    return wire.decode(fields.get(b"data", b""), RolloutGroup)


class Questions:
    """The questions that one replica may answer, from its start on."""

    def __init__(self, bus: Bus, replica: str) -> None:
        self._bus = bus
        self._replica = replica
        self._after = ""

    async def read(self) -> list[Prompt]:
        """Wait a moment for questions; return those that this replica claimed."""
        if not self._after:
            newest = await self._bus.xrevrange(QUESTIONS, count=1)
            self._after = newest[0][0] if newest else "0-0"
        claimed = []
        for entry, fields in await self._bus.xread({QUESTIONS: self._after}, _MOST, _IDLE_S):
            self._after = entry
            try:
                prompt = wire.decode(fields.get(b"data", b""), Prompt)
            except MessageError:
                continue
            if prompt.purpose is Purpose.ASK and await self._claim(prompt):
                claimed.append(prompt)
        return claimed

    async def _claim(self, prompt: Prompt) -> bool:
        claim = CLAIM.of(str(prompt.group_id))
        return bool(await self._bus.write(claim, "SET", self._replica, "NX", "EX", _CLAIM_S))

    async def answer(self, prompt: Prompt, group: RolloutGroup) -> None:
        await self._bus.publish(ANSWERS, group, str(prompt.group_id))

    async def refuse(self, prompt: Prompt, reason: str) -> None:
        """Publish why the question has no completions."""
        await self._bus.append(ANSWERS, {"id": str(prompt.group_id), "refusal": reason})
