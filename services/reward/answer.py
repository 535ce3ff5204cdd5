"""Compare a completion's answer with the reference: as text, as a number, or as mathematics.

::

    completion ──▶ extract ──▶ answer ── as text, or both plain numbers ──▶ verdict, in microseconds
                     │            └── (mode math) both plain mathematics ──▶ verdict, in a millisecond
                     │                    └── seen lately? ──▶ verdict
                     │                            └── a killable process ──▶ verdict, in tens of milliseconds
                     └── none, or cut off ──▶ wrong_format

Equal answers of a group are compared once. ``math`` accepts whatever has the same value, ``12+34`` for ``46`` too: where
evaluating *is* the task, use ``numeric`` or ``exact``. In this process, what a model writes is read with bounds on its length,
depth and numbers (:mod:`plain_numbers`, :mod:`plain_mathematics`) or not at all.
"""

import asyncio
import importlib.util
import math
import sys
from collections.abc import Iterable
from fractions import Fraction
from functools import partial

from services.reward import plain_mathematics, plain_numbers
from services.reward.extraction import extract
from services.reward.plain_numbers import PlainNumber
from services.reward.processes import Crashed, Overdue, Processes
from services.reward.recent import Recent
from services.reward.scorer import is_cut, unavailable, valued
from services.reward.turns import Turns
from shared.errors import PermanentError, SettingsError, TemporaryError
from shared.messages import Prompt, RolloutGroup, Sample, Score, ScoreStatus
from shared.settings import scorers

COMMAND = (sys.executable, "-m", "services.reward.comparison")
"""Starts one matcher process."""
_REMEMBERED = 4096
_WANTED = {"boxed": r"\boxed{…}", "hashes": "#### before the answer", "last_number": "a number", "choice": "a letter"}


class AnswerMatcher:
    """Score 1 where the answer equals the reference, else 0.

    Args:
        scorer: its settings.
        answer_field: the dataset's column with the reference, for messages.
        command: starts a matcher process.
    """

    def __init__(
        self, scorer: scorers.AnswerScorer, answer_field: str = "answer", command: tuple[str, ...] = COMMAND
    ) -> None:
        self.name = scorer.name
        self._scorer = scorer
        self._answer_field = answer_field
        if not math.isfinite(scorer.tolerance):
            raise SettingsError(
                f"expected a finite tolerance of scorer {scorer.name!r}, found {scorer.tolerance}: "
                "change tolerance in [[reward.scorers]]"
            )
        self._tolerance = Fraction(repr(scorer.tolerance))
        self._processes = Processes(command, scorer.processes, scorer.name, computes=True)
        self._remembered = Recent(_REMEMBERED)
        self._turns = Turns()

    async def start(self) -> None:
        """Start and warm the matcher processes, where the mode needs them.

        Raises:
            SettingsError: math-verify is not installed.
        """
        if self._scorer.mode != "math" or self._scorer.extract == "choice":
            return
        if importlib.util.find_spec("math_verify") is None:
            raise SettingsError(
                f"expected the package math-verify for scorer {self.name!r} with mode = 'math', found none: "
                "pip install 'penstock[reward]', or change mode in [[reward.scorers]]"
            )
        await self._processes.warm()

    async def close(self) -> None:
        """Kill the matcher processes."""
        await self._processes.close()

    async def score(self, group: RolloutGroup) -> list[Score]:
        """Compare each sample's answer with the reference answer of the prompt.

        Raises:
            PermanentError: the prompt has no reference answer, or none that the mode can compare with.
        """
        reference = self._reference(group.prompt)
        answers = [await self._turns.take(partial(self._answer, sample)) for sample in group.samples]
        scores = await self._scores(reference, (answer for answer in answers if isinstance(answer, str)))
        return [scores[answer] if isinstance(answer, str) else answer for answer in answers]

    def _reference(self, prompt: Prompt) -> str:
        text = (prompt.answer or "").strip()
        if not text:
            raise PermanentError(
                f"expected an answer for scorer {self.name!r} in the column {self._answer_field!r} of {prompt.problem}, "
                "found none: change data.answer_field"
            )
        reference = self._extract(text) or text
        if self._scorer.extract == "choice" and reference not in self._scorer.choices:
            raise PermanentError(
                f"expected one of the letters {self._scorer.choices} as the answer of {prompt.problem}, found "
                f"{reference[:80]!r}: change the data, or choices of scorer {self.name!r} in [[reward.scorers]]"
            )
        if self._scorer.mode == "numeric" and plain_numbers.read(reference) is None:
            raise PermanentError(
                f"expected a number as the answer of {prompt.problem}, found {reference[:80]!r}: "
                f"change the data, or mode of scorer {self.name!r} in [[reward.scorers]]"
            )
        return reference

    def _extract(self, text: str) -> str | None:
        return extract(text, self._scorer.extract, self._scorer.tag, self._scorer.choices)

    def _answer(self, sample: Sample) -> str | Score:
        """Return the sample's answer, or the score that says why there is none."""
        if self._scorer.needs_stop and is_cut(sample):
            return self._wrong_format("cut at its length limit")
        answer = self._extract(sample.text)
        if answer is None:
            return self._wrong_format(f"expected {_WANTED.get(self._scorer.extract, 'an answer')}, found none")
        return answer

    async def _scores(self, reference: str, answers: Iterable[str]) -> dict[str, Score]:
        """Return the score of each different answer."""
        scores: dict[str, Score] = {}
        slow: dict[str, asyncio.Task[Score]] = {}
        async with asyncio.TaskGroup() as comparing:
            for answer in dict.fromkeys(answers):
                score = await self._turns.take(partial(self._score_at_once, reference, answer))
                if score is None:
                    slow[answer] = comparing.create_task(self._compare(reference, answer))
                else:
                    scores[answer] = score
        return scores | {answer: task.result() for answer, task in slow.items()}

    def _score_at_once(self, reference: str, answer: str) -> Score | None:
        """Return the score where it needs no computer algebra, else None."""
        mode = self._scorer.mode
        if answer == reference or mode == "exact" or self._scorer.extract == "choice":
            return self._judged(answer == reference, answer)
        expected, found = plain_numbers.read(reference), plain_numbers.read(answer)
        if expected is not None and found is not None:
            return self._judged(plain_numbers.close(expected, found, self._tolerance_of(expected, found)), answer)
        if mode == "numeric":
            return self._wrong_format(f"expected a number, found {answer[:80]!r}")
        equal = plain_mathematics.compare(reference, answer)
        return self._remembered.get(reference, answer) if equal is None else self._judged(equal, answer)

    def _tolerance_of(self, expected: PlainNumber, found: PlainNumber) -> Fraction:
        """In mathematics whole numbers and fractions are exact; only what is written rounded has a tolerance."""
        exact = self._scorer.mode == "math" and not (expected.rounded or found.rounded)
        return Fraction(0) if exact else self._tolerance

    async def _compare(self, reference: str, answer: str) -> Score:
        try:
            verdict = await self._processes.ask({"reference": reference, "answer": answer}, self._scorer.timeout_s)
        except Overdue as error:
            score = valued(self.name, ScoreStatus.TIMEOUT, 0.0, str(error))
        except Crashed as error:
            return valued(self.name, ScoreStatus.CRASHED, 0.0, str(error))
        except TemporaryError as error:
            return unavailable(self.name, str(error))
        else:
            score = self._read_verdict(verdict.get("status"), verdict.get("equal"), str(verdict.get("detail")), answer)
        self._remembered.put(score, reference, answer)
        return score

    def _read_verdict(self, status: object, equal: object, detail: str, answer: str) -> Score:
        if status == "ok":
            return self._judged(equal is True, answer)
        return valued(self.name, ScoreStatus(str(status)), 0.0, detail)

    def _judged(self, equal: bool, answer: str) -> Score:
        return valued(self.name, ScoreStatus.OK, float(equal), "" if equal else f"found {answer[:80]!r}")

    def _wrong_format(self, detail: str) -> Score:
        return valued(self.name, ScoreStatus.WRONG_FORMAT, 0.0, detail)
