"""One episode: answers to messages, drawn within its limits, on its tree of tokens."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from prometheus_client import Counter, Histogram

from penstock.services.episodes.answers import AnswerParser
from penstock.services.episodes.messages import Message
from penstock.services.episodes.renderer import Renderer, Tools
from penstock.services.episodes.tree import Segment, Tree, Turn, turn_of
from penstock.shared.bus.messages import Ended, FinishReason, Int32Array, Prompt, Sample, Sampling
from penstock.shared.bus.transcripts import TranscribedTurn, written
from penstock.shared.errors import PenstockError, PermanentError
from penstock.shared.model.tokenizer import clock_of
from penstock.shared.peers.turns import DrawnTurn

TURN_SECONDS = Histogram(
    "penstock_episodes_turn_seconds",
    "Seconds of a turn: wait (for its tools or agent, since the answer before), render, draw.",
    ["part"],
    buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
FORKS = Counter(
    "penstock_episodes_forks_total",
    "Turns whose history is a branch, by cause: history (of other messages than were sent), template (it writes earlier "
    "messages otherwise).",
    ["cause"],
)
for _cause in ("history", "template"):
    FORKS.labels(_cause)
BEFORE = Counter("penstock_episodes_history_tokens_total", "Tokens before turns, which replicas read or have cached.")
CACHED = Counter("penstock_episodes_cached_tokens_total", "Of these, tokens in the prefix cache of the turn's replica.")
_MARKER = "tools"


class EpisodeOver(PenstockError):
    """No more turns: ``ended`` says why."""

    def __init__(self, ended: Ended, message: str) -> None:
        super().__init__(message)
        self.ended = ended


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    turns: int
    context_tokens: int
    """Of a turn with all before it."""
    deadline_s: float


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Answer:
    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    drawn: DrawnTurn
    stopped: str = ""
    """The stop text that the message was cut at."""


_Place = tuple[Turn | None, Segment, Sequence[Message], str]
"""The turn that a history continues, where its ids end, the messages between, and why it is a branch."""
Draw = Callable[[Int32Array, Sampling, int], Awaitable[DrawnTurn]]
"""Ids, sampling and the number of the turn to what the policy draws after them."""


class Episode:
    """One sample of ``prompt``; on the event loop."""

    def __init__(self, prompt: Prompt, renderer: Renderer, parser: AnswerParser, draw: Draw, limits: Limits) -> None:
        self.prompt = prompt
        self.ended = Ended.STOP
        self.metrics: Mapping[str, float] = {}
        """What its agent reports, for the transcript."""
        self._renderer, self._parser, self._draw, self._limits = renderer, parser, draw, limits
        self._tree = Tree()
        self._begun = 0
        self._ends_at_s = time.monotonic() + limits.deadline_s
        self._last: Turn | None = None
        self._turns: list[Turn] = []
        self._transcribed: list[TranscribedTurn] = []
        self._answered_s = time.monotonic()

    @property
    def turns(self) -> int:
        return self._tree.turns

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self._ends_at_s - time.monotonic())

    async def answer(
        self, messages: Sequence[Message], tools: Tools = (), max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Answer:
        """Draw the answer to ``messages``.

        Raises:
            EpisodeOver: a limit was reached.
            PermanentError: these messages cannot be rendered.
            TemporaryError: no replica can draw it.
        """
        known = [*_marker(tools), *messages]
        markers = len(known) - len(messages)
        return await self._turn(lambda: self._placed(known, markers, tools), max_tokens, stop, has_tools=bool(tools))

    async def answer_tokens(
        self, token_ids: Int32Array, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Answer:
        """Draw what follows token ids, at the turns whose ids they repeat. Raises as :meth:`answer` does."""
        return await self._turn(lambda: self._placed_tokens(token_ids), max_tokens, stop, has_tools=False)

    async def _turn(
        self, place: Callable[[], Awaitable[_Place]], max_tokens: int | None, stop: Sequence[str], *, has_tools: bool
    ) -> Answer:
        if self._begun >= self._limits.turns:
            raise self._over(Ended.TURNS, f"the episode has had its {self._limits.turns} turns (episodes.max_turns)")
        self._begun += 1
        try:
            async with asyncio.timeout(self.left_s):
                return await self._answer(place, max_tokens, stop, has_tools=has_tools)
        except TimeoutError as error:
            words = f"the episode has had its {self._limits.deadline_s:g} s (episodes.deadline_s)"
            raise self._over(Ended.DEADLINE, words) from error

    async def count(self, messages: Sequence[Message], tools: Tools = ()) -> int:
        """Return how many tokens messages are. Raises PermanentError: they cannot be rendered."""
        return len(await asyncio.to_thread(self._renderer.whole, messages, tools, clock_of(self.prompt)))

    async def _answer(
        self, place: Callable[[], Awaitable[_Place]], max_tokens: int | None, stop: Sequence[str], *, has_tools: bool
    ) -> Answer:
        number, started_s = self._begun, time.monotonic()
        waited_s = started_s - self._answered_s
        after, at, before, fork = await place()
        ids, rendered_s = at.path, time.monotonic()
        sampling = self._sampling(len(ids), max_tokens, stop)
        drawn = await self._draw(ids, sampling, number)
        if self._turns:
            TURN_SECONDS.labels("wait").observe(waited_s)
        TURN_SECONDS.labels("render").observe(rendered_s - started_s)
        BEFORE.inc(len(ids))
        CACHED.inc(min(drawn.cached, len(ids)))
        TURN_SECONDS.labels("draw").observe(time.monotonic() - rendered_s)
        message = self._parser(ids, drawn.token_ids, has_tools=has_tools)
        message, stopped = _cut_at(message, stop)
        answer = Answer(message, drawn.finish_reason, len(ids), drawn, stopped)
        self._last = self._tree.add(at, drawn, after, before, message)
        self._turns.append(self._last)
        self._answered_s = time.monotonic()
        self._transcribed.append(
            TranscribedTurn(
                messages=[each.for_template() for each in (*before, message) if each.role != _MARKER],
                after=None if after is None else after.number,
                segment=0,  # known at the end
                tokens=len(drawn.token_ids),
                versions=sorted(set(drawn.version_spans[:, 1].tolist())),
                seconds=round(self._answered_s - started_s, 3),
                waited_s=round(waited_s, 3),
                fork=fork,
            )
        )
        return answer

    async def _placed_tokens(self, token_ids: Int32Array) -> _Place:
        if int(token_ids.max()) >= self._parser.vocabulary:
            raise PermanentError(
                f"expected token ids under the policy's {self._parser.vocabulary}, found {token_ids.max()}"
            )
        self._check_room(len(token_ids))
        at, _ = self._tree.place(token_ids, None)
        after, given = turn_of(at)
        fork = "history" if self._tree.turns and after is None else ""
        if fork:
            FORKS.labels(fork).inc()
        return after, at, (Message("tokens", self._parser.decode([given])[0]),), fork

    async def _placed(self, known: Sequence[Message], first: int, tools: Tools) -> _Place:
        """Place a history; its ``first`` messages are markers."""
        clock_s = clock_of(self.prompt)
        after, answered = self._tree.attach(known)
        if after is not None:
            exact = [*after.history[first:], *known[answered:]]  # with the reasoning that clients do not send
            last_id = int(after.segment.token_ids[-1])
            rest = await asyncio.to_thread(self._renderer.after, exact, answered - first, tools, last_id, clock_s)
            if rest is not None:
                return after, self._tree.place(rest, after)[0], known[answered:], ""
        cause = ""
        if self._tree.turns:
            is_new = after is None or any(message.role == "assistant" for message in known[answered:])
            cause = "history" if is_new else "template"
            FORKS.labels(cause).inc()
        exact = [*(after.history[first:] if after else ()), *known[answered if after else first :]]
        whole = await asyncio.to_thread(self._renderer.whole, exact, tools, clock_s)
        return after, self._tree.place(whole, None)[0], known[answered:], cause

    def _sampling(self, ids: int, max_tokens: int | None, stop: Sequence[str]) -> Sampling:
        given, left = self.prompt.sampling, self._check_room(ids)
        most = max(1, min(left, given.max_new_tokens, max_tokens or given.max_new_tokens))
        return dataclasses.replace(
            given,
            samples=1,
            max_new_tokens=most,
            min_new_tokens=min(most, given.min_new_tokens),
            stop=(*given.stop, *stop),
        )

    def _check_room(self, ids: int) -> int:
        """Return how many tokens may follow. Raises EpisodeOver."""
        left = self._limits.context_tokens - ids
        if left < max(1, self.prompt.sampling.min_new_tokens):
            raise self._over(Ended.CONTEXT, f"the episode has {ids} tokens, of {self._limits.context_tokens} at most")
        return left

    def _over(self, ended: Ended, message: str) -> EpisodeOver:
        self.ended = ended
        return EpisodeOver(ended, message)

    @property
    def routes(self) -> bytes:
        """The experts of its turns' tokens (``penstock.shared.model.routes``)."""
        return self._tree.routes()

    def sample(self, reward: float | None) -> Sample:
        """Return the episode as a sample. Raises ValueError: no turn was drawn."""
        columns, rows = self._tree.columns(), self._tree.rows()
        assert self._last is not None
        cut = self.ended in (Ended.LENGTH, Ended.CONTEXT, Ended.TURNS, Ended.DEADLINE)
        return Sample(
            token_ids=columns.token_ids,
            behavior_logprobs=columns.behavior_logprobs,
            version_spans=columns.version_spans,
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
            text=self._last.answer.text,
            support_sizes=columns.support_sizes,
            support_ids=columns.support_ids,
            segments=columns.segments,
            ended=self.ended,
            transcript=written(
                [
                    dataclasses.replace(each, segment=rows[id(turn.segment)])
                    for turn, each in zip(self._turns, self._transcribed, strict=True)
                ],
                self.metrics,
            ),
            environment_reward=reward,
        )


def _marker(tools: Tools) -> list[Message]:
    """Return what stands for the tools in a history: other tools make another one."""
    return [Message(_MARKER, json.dumps(list(tools), sort_keys=True))] if tools else []


def _cut_at(message: Message, stop: Sequence[str]) -> tuple[Message, str]:
    """Return the message before the first of the client's stop texts."""
    places = {text: message.text.find(text) for text in stop}
    hits = {text: place for text, place in places.items() if place >= 0}
    if not hits:
        return message, ""
    first = min(hits, key=lambda text: hits[text])
    return dataclasses.replace(message, text=message.text[: hits[first]]), first
