"""Play an episode: the policy's answers and what its tools return, until it calls none."""

import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from typing import Any

from prometheus_client import Counter

from penstock.services.episodes.drivers.hosts import Host, HostLost, Hosts
from penstock.services.episodes.drivers.python import NAME, TOOL, Python, PythonSession
from penstock.services.episodes.episode import Episode, EpisodeOver
from penstock.services.episodes.messages import Message, ToolCall
from penstock.shared.bus.messages import Ended, FinishReason, Prompt
from penstock.shared.errors import PermanentError, SettingsError, TemporaryError
from penstock.shared.settings.rollout import EpisodesSettings

log = logging.getLogger(__name__)

TOOL_CALLS = Counter(
    "penstock_episodes_tool_calls_total",
    "Calls of tools: answered, raised (its error is the answer), or unavailable. Those of names that are no tool's are other.",
    ["tool", "status"],
)
OTHER, _STATUSES = "other", ("answered", "raised", "unavailable")
_REPEATED = 3
"""Times that a call of a tool without a state is made."""


def _export(tool: str) -> None:
    """Export 0, so that the first increase shows."""
    for status in _STATUSES:
        TOOL_CALLS.labels(tool, status)


_export(OTHER)


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """Where an episode's calls are answered."""

    host: Host | None
    """None if there is no code of the user's."""
    slot: int
    python: PythonSession | None


class ToolLoop:
    """Plays episodes; ``answer_field`` is the column of a row's reference answer. Raises SettingsError."""

    def __init__(
        self, settings: EpisodesSettings, hosts: Hosts, answer_field: str, python: Python | None = None
    ) -> None:
        self._settings, self._hosts, self._answer_field, self._python = settings, hosts, answer_field, python
        self._tools = [*hosts.tools, *([TOOL] if python else [])]
        if python and any(tool["function"]["name"] == NAME for tool in hosts.tools):
            raise SettingsError(f"expected no tool {NAME!r} with episodes.executor, whose name it is: rename it")
        self._names = {str(tool["function"]["name"]) for tool in self._tools}
        for name in self._names:
            _export(name)

    async def play(self, episode: Episode) -> float | None:
        """Play it to its end; return its environment's reward, if that has one.

        Raises:
            TemporaryError: tools or environment could not work.
            PermanentError: the prompt cannot be rendered.
        """
        prompt, of = episode.prompt, self._settings
        async with self._room((prompt.group_id, prompt.sample)) as room:
            row, text = row_of(prompt, self._answer_field), None
            if room.host is not None:
                asked = room.host.ask(room.slot, "reset", of.setup_s + of.patience_s, "setup_s", row=row)
                text = (await asked)["value"]
            try:
                await self._converse(episode, room, opening(prompt, text))
            except EpisodeOver as over:
                episode.ended = over.ended
            except PermanentError as error:  # what was said is refused by the template, or the engine
                if not episode.turns:
                    raise
                log.warning("episode ended early", extra={"group": prompt.group_id, "reason": str(error)})
                episode.ended = Ended.STOP
            if not of.environment or room.host is None:
                return None
            reward: float | None = (await room.host.ask(room.slot, "reward", of.tool_s, "tool_s"))["value"]
            return reward

    @contextlib.asynccontextmanager
    async def _room(self, episode: Hashable) -> AsyncIterator[Room]:
        async with contextlib.AsyncExitStack() as held:
            host, slot = None, 0
            if self._settings.has_code:
                host, slot = await held.enter_async_context(self._hosts.place(episode))
            python = await held.enter_async_context(self._python.session()) if self._python else None
            yield Room(host, slot, python)

    async def _converse(self, episode: Episode, room: Room, messages: list[Message]) -> None:
        while True:
            answer = await episode.answer(messages, self._tools)
            messages.append(answer.message)
            if not answer.message.calls:
                episode.ended = Ended.LENGTH if answer.finish_reason is FinishReason.LENGTH else Ended.STOP
                return
            for call in answer.message.calls:
                said = await self._answered(room, call)
                messages.append(Message("tool", said["value"], call_id=call.id, name=call.name))
                if said.get("done"):
                    episode.ended = Ended.STOP
                    return

    async def _answered(self, room: Room, call: ToolCall) -> Mapping[str, Any]:
        if room.python is None or (room.host is not None and call.name != NAME):
            assert room.host is not None
            return await self._call(room.host, room.slot, call)
        if call.name != NAME:
            return self._counted(call, {"value": f"there is no tool {call.name[:100]!r}, but {NAME}", "raised": True})
        try:
            return self._counted(call, {"value": await room.python.call(call)})
        except TemporaryError:
            self._count(call, "unavailable")
            raise

    async def _call(self, host: Host, slot: int, call: ToolCall) -> Mapping[str, Any]:
        """Call a tool; one without a state again if it did not work, elsewhere, as its process may be lost.

        A stateless one that never answers is the policy's business, which asked for what does not end.
        """
        given, limit_s = (
            {"name": call.name, "arguments": call.values},
            self._settings.tool_s + self._settings.patience_s,
        )
        try:
            return self._counted(call, await host.ask(slot, "call", limit_s, "tool_s", **given))
        except TemporaryError as error:
            self._count(call, "unavailable")
            failed = error
        for _ in range(0 if self._settings.keeps_state else _REPEATED - 1):
            try:
                async with self._hosts.place(call) as (other, place):
                    return self._counted(call, await other.ask(place, "call", limit_s, "tool_s", **given))
            except TemporaryError as error:
                self._count(call, "unavailable")
                failed = error
        if self._settings.keeps_state or not isinstance(failed, HostLost):
            raise failed
        return {"value": f"no answer within {limit_s:g} s"}

    def _counted(self, call: ToolCall, said: Mapping[str, Any]) -> Mapping[str, Any]:
        self._count(call, "raised" if said.get("raised") else "answered")
        return said

    def _count(self, call: ToolCall, status: str) -> None:
        TOOL_CALLS.labels(call.name if call.name in self._names else OTHER, status).inc()


def opening(prompt: Prompt, text: str | None) -> list[Message]:
    """Return the first messages: the prompt's, with an environment's ``text`` after the last of the user."""
    messages = [Message(turn.role, turn.content) for turn in prompt.messages or ()]
    if prompt.text is not None:
        messages = [Message("user", prompt.text)]
    if not text:
        return messages
    places = [place for place, message in enumerate(messages) if message.role == "user"]
    if not places:
        return [*messages, Message("user", text)]
    asked = messages[places[-1]]
    messages[places[-1]] = dataclasses.replace(asked, text=f"{asked.text}{text}")
    return messages


def row_of(prompt: Prompt, answer_field: str) -> dict[str, Any]:
    """Return a dataset row as environments and agents receive it."""
    asked: str | Sequence[Any] | None = prompt.text
    if prompt.messages is not None:
        asked = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
    return {**prompt.extra, answer_field: prompt.answer, "prompt": asked}
