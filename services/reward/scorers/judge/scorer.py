"""The LLM judge: a language model behind an HTTP endpoint grades each completion (docs/rewards.md, "A judge")."""

import asyncio

from penstock.services.reward.scorers.judge.chat import ChatClient
from penstock.services.reward.scorers.judge.verdict import VerdictReader, fill
from penstock.services.reward.scorers.scorer import unavailable, valued
from penstock.services.reward.subprocess_pool.cache import Recent
from penstock.shared.bus.messages import RolloutGroup, Score, ScoreStatus
from penstock.shared.errors import TemporaryError
from penstock.shared.settings.rewards.scorers import JudgeScorer

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
        async with asyncio.TaskGroup() as asking:
            tasks = {question: asking.create_task(self._judge(question)) for question in dict.fromkeys(questions)}
        return [tasks[question].result() for question in questions]

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
