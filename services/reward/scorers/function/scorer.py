"""Score with the user's Python function, called for each sample in a killable process; not a sandbox."""

import asyncio
import base64
import dataclasses
import sys

from penstock.services.reward.scorers.scorer import unavailable, valued
from penstock.services.reward.subprocess_pool.pool import Crashed, NotReady, Overdue, Processes, Share
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Json, RolloutGroup, Sample, Score, ScoreStatus
from penstock.shared.errors import SettingsError, TemporaryError
from penstock.shared.settings.rewards.scorers import PythonScorer
from penstock.shared.tasks import together


class FunctionScorer:
    def __init__(self, scorer: PythonScorer) -> None:
        self.name = scorer.name
        self._scorer = scorer
        program = "penstock.services.reward.scorers.function.function_call"
        command = (sys.executable, "-m", program, scorer.function)
        self._processes = Processes(command, scorer.processes, scorer.name, scorer.environment)

    async def start(self) -> None:
        try:
            await self._processes.warm()
        except NotReady as error:
            raise SettingsError(
                f"could not load the function {self._scorer.function!r} of scorer {self.name!r}: "
                f"{error}: change function in [[reward.scorers]], or PYTHONPATH"
            ) from error

    async def close(self) -> None:
        await self._processes.close()

    async def score(self, group: RolloutGroup) -> list[Score]:
        turns, share = asyncio.Semaphore(self._scorer.processes), Share()

        async def call(sample: Sample) -> Score:
            async with turns:
                return await self._call(group, sample, share)

        return await together(call(sample) for sample in group.samples)

    async def _call(self, group: RolloutGroup, sample: Sample, share: Share) -> Score:
        alone = wire.encode(dataclasses.replace(group, samples=(sample,)))
        question: dict[str, Json] = {"group": base64.b64encode(alone).decode()}
        try:
            answer = await self._processes.ask(question, self._scorer.timeout_s, share)
        except Overdue as error:
            return self._failed(ScoreStatus.TIMEOUT, f"{error} (timeout_s) from {self._scorer.function}")
        except Crashed as error:
            return self._failed(ScoreStatus.CRASHED, f"{error}: {self._scorer.function}")
        except TemporaryError as error:
            return unavailable(self.name, str(error))
        if "error" in answer:
            return self._failed(ScoreStatus.CRASHED, str(answer["error"]))
        value, detail = answer["value"], str(answer["detail"])
        if not isinstance(value, float):
            return unavailable(self.name, detail)
        return valued(self.name, ScoreStatus(str(answer["status"])), value, detail)

    def _failed(self, status: ScoreStatus, detail: str) -> Score:
        if self._scorer.on_error == "zero":
            return valued(self.name, status, 0.0, detail)
        return unavailable(self.name, detail)
