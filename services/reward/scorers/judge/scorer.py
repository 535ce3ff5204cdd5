"""The LLM judge: a language model behind an HTTP endpoint grades each completion (docs/rewards.md, "A judge")."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from prometheus_client import Counter

from penstock.services.reward.endpoint import Endpoint, Passing
from penstock.services.reward.scorers.judge.verdict import VerdictReader, fill
from penstock.services.reward.scorers.scorer import unavailable, valued
from penstock.services.reward.subprocess_pool.cache import Recent
from penstock.shared.bus.messages import RolloutGroup, Score, ScoreStatus
from penstock.shared.errors import TemporaryError
from penstock.shared.http.answer import Answer
from penstock.shared.settings.rewards.scorers import JudgeScorer
from penstock.shared.tasks import together

TOKENS = Counter(
    "penstock_reward_judge_tokens_total",
    "Tokens as a judge's endpoint counts them: prompt or completion.",
    ["scorer", "of"],
)
_LONGEST_SHOWN = 120
_MOST_TOKENS = 10**9
_REQUEST = {"max_tokens": 512, "temperature": 0.0}
"""Defaults of `request`."""
T = TypeVar("T")


class ChatClient:
    """Query one model at one endpoint. Raises SettingsError for an invalid URL or key."""

    def __init__(self, scorer: JudgeScorer) -> None:
        self._scorer = scorer
        self._endpoint = Endpoint(
            scorer.name,
            f"scorer {scorer.name!r} in [[reward.scorers]]",
            scorer.url,
            scorer.key_source,
            "chat message",
            timeout_s=scorer.timeout_s,
            concurrency=scorer.concurrency,
        )

    async def close(self) -> None:
        await self._endpoint.close()

    async def ask(self, question: str, read: Callable[[str], Awaitable[T | None]]) -> T:
        """Return ``read(answer)``; asks again while that is None. Raises what ``Endpoint.ask`` raises."""

        async def verdict(answer: str) -> T:
            if (value := await read(answer)) is None:
                shown = self._endpoint.hidden(answer)[-_LONGEST_SHOWN:]
                raise Passing(f"there is no verdict in {shown!r}")
            return value

        return await self._endpoint.ask("chat/completions", self._body(question), self._content, verdict)

    def _body(self, question: str) -> dict[str, object]:
        return {
            "model": self._scorer.model,
            "messages": [{"role": "user", "content": question}],
            **_REQUEST,
            **self._scorer.request,
        }

    def _content(self, answer: Answer) -> str:
        value = answer.json()
        content = value["choices"][0]["message"]["content"]
        if not isinstance(content, str):
            raise TypeError("the message is not text")
        self._count(value.get("usage"))
        return content

    def _count(self, usage: object) -> None:
        for of in ("prompt", "completion"):
            count = usage.get(f"{of}_tokens") if isinstance(usage, dict) else None
            if isinstance(count, int) and 0 < count <= _MOST_TOKENS:
                TOKENS.labels(self._scorer.name, of).inc(count)


_REMEMBERED = 16_384


class Judge:
    """Score completions with a language model. Raises SettingsError."""

    def __init__(self, scorer: JudgeScorer) -> None:
        self.name = scorer.name
        self._scorer = scorer
        self._reader = VerdictReader(scorer)
        self._client = ChatClient(scorer)
        self._remembered = Recent(_REMEMBERED)

    async def start(self) -> None:
        """Do nothing: groups wait for an endpoint that is not up yet."""

    async def close(self) -> None:
        await self._client.close()
        await self._reader.close()

    async def score(self, group: RolloutGroup) -> list[Score]:
        questions = await asyncio.to_thread(
            lambda: [fill(self._scorer.template, group.prompt, sample) for sample in group.samples]
        )
        different = list(dict.fromkeys(questions))
        scores = dict(zip(different, await together(map(self._judge, different)), strict=True))
        return [scores[question] for question in questions]

    async def _judge(self, question: str) -> Score:
        score = self._remembered.get(question)
        if score is None:
            score = await self._ask(question)
            if score.value is not None:
                self._remembered.put(score, question)
        return score

    async def _ask(self, question: str) -> Score:
        try:
            value = await self._client.ask(question, self._reader.read)
        except TemporaryError as error:
            return unavailable(self.name, str(error))
        return valued(self.name, ScoreStatus.OK, value)
