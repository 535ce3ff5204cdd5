"""Compare a completion's answer with the reference: as text, as a number, or as mathematics.

Texts and numbers are compared in microseconds; formulas in a killable process.
"""

import asyncio
import dataclasses
import importlib.util
import logging
import math
import re
import sys
from collections.abc import Iterable
from fractions import Fraction
from functools import partial

from penstock.services.reward.scorers.answer import extraction, matching
from penstock.services.reward.scorers.answer.matching import Attempt
from penstock.services.reward.scorers.answer.mathematics import plain_numbers
from penstock.services.reward.scorers.answer.notation import plain
from penstock.services.reward.scorers.scorer import is_cut, unavailable, valued
from penstock.services.reward.scorers.turns import Turns
from penstock.services.reward.subprocess_pool.cache import Recent
from penstock.services.reward.subprocess_pool.pool import Crashed, Overdue, Processes, Share
from penstock.shared.bus.messages import Json, RolloutGroup, Sample, Score, ScoreStatus
from penstock.shared.errors import PermanentError, SettingsError, TemporaryError
from penstock.shared.extras import install_command
from penstock.shared.settings.rewards import scorers

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "penstock.services.reward.scorers.answer.mathematics.comparison")
TIMEOUT_S = 1.0
"""CPU time of one comparison; honest formulas take milliseconds."""
_LONGEST_COMPLETION = 20_000
"""In characters; with the preset math-verify the end of a longer completion is read."""
PROCESSES = 2
"""While one process is busy, the other answers."""
_REMEMBERED = 4096
_DOLLAR = re.compile(r"(?<!\\)\$")
_STATED = "stated"
"""Suffix of a letter stated in prose."""
_WANTED = {"boxed": r"\boxed{…}", "hashes": "#### before the answer", "last_number": "a number", "choice": "a letter"}


@dataclasses.dataclass(frozen=True, slots=True)
class Equality:
    """Whether two formulas are equal, and the rule that it took."""

    equal: bool
    rule: str = ""


_DIFFERENT = Equality(False)


class AnswerMatcher:
    """Score 1 if the answer equals the reference, otherwise 0."""

    def __init__(
        self,
        scorer: scorers.AnswerScorer,
        answer_field: str = "answer",
        command: tuple[str, ...] = COMMAND,
        timeout_s: float = TIMEOUT_S,
        processes: int = PROCESSES,
    ) -> None:
        self.name = scorer.name
        self._scorer = scorer
        self._answer_field = answer_field
        self._timeout_s = timeout_s
        if not math.isfinite(scorer.closeness):
            raise SettingsError(
                f"expected a finite tolerance of scorer {scorer.name!r}, found {scorer.tolerance}: "
                "change tolerance in [[reward.scorers]]"
            )
        self._tolerance = Fraction(repr(scorer.closeness))
        self._lenient = scorer.forgiven
        self._library = scorer.preset == "math-verify"
        self._processes = Processes(command, processes, scorer.name, computes=True)
        self._remembered = Recent(_REMEMBERED)
        self._turns = Turns()

    async def start(self) -> None:
        if self._scorer.mode != "math" or self._scorer.place == "choice":
            return
        if importlib.util.find_spec("math_verify") is None:
            raise SettingsError(
                f"scorer {self.name!r} with mode = 'math' needs the package math-verify: "
                f"{install_command('reward')}, or change mode in [[reward.scorers]]"
            )
        await self._processes.warm()

    async def close(self) -> None:
        await self._processes.close()

    async def score(self, group: RolloutGroup) -> list[Score]:
        """Raises PermanentError: the reference is missing or unusable in this mode."""
        reference = self.reference(group.prompt.answer, group.prompt.problem)
        answers = [await self._turns.take(partial(self._answer, sample)) for sample in group.samples]
        scores = await self._scores(reference, (answer for answer in answers if isinstance(answer, str)))
        return [scores[answer] if isinstance(answer, str) else answer for answer in answers]

    def reference(self, text: str | None, problem: str = "this row") -> str:
        """Return the reference in ``text``. Raises PermanentError: it is missing or unusable in this mode."""
        text = (text or "").strip()
        if not text:
            raise PermanentError(
                f"expected an answer for scorer {self.name!r} in the column {self._answer_field!r} of {problem}, "
                "but it is empty: change data.answer_field"
            )
        if self._library:
            return text
        is_verbatim = self._scorer.mode == "exact" and self._scorer.place in ("hashes", "tag")  # boxes stay in answers
        reference = self._extract(text) or extraction.extract(text, "whole" if is_verbatim else "auto") or text
        if self._scorer.place == "choice" and reference not in self._scorer.choices:
            raise PermanentError(
                f"expected one of the letters {self._scorer.choices} as the answer of {problem}, found "
                f"{reference[:80]!r}: change the data, or extract of scorer {self.name!r} in [[reward.scorers]]"
            )
        if self._scorer.mode == "numeric" and not _is_number(reference):
            raise PermanentError(
                f"expected a number as the answer of {problem}, found {reference[:80]!r}: "
                f"change the data, or mode of scorer {self.name!r} in [[reward.scorers]]"
            )
        return reference

    async def matches_itself(self, reference: str) -> bool:
        """Whether the reference, written where a completion writes it, without dollar signs, is worth 1, or could not be
        compared in time here.
        """
        written = _DOLLAR.sub("", reference).strip() if self._scorer.mode == "math" else reference
        score = (await self._scores(reference, [written]))[written]
        return score.value != 0 or score.status not in (ScoreStatus.OK, ScoreStatus.WRONG_FORMAT)

    def _extract(self, text: str) -> str | None:
        return extraction.extract(text, self._scorer.place, self._scorer.tag, self._scorer.choices)

    def _answer(self, sample: Sample) -> str | Score:
        if self._scorer.needs_stop and is_cut(sample):
            return self._wrong_format("cut at its length limit")
        if self._scorer.place == "choice":
            return self._choice(sample.text)
        if self._library and self._scorer.place == "auto":
            return sample.text[-_LONGEST_COMPLETION:]
        answer = self._extract(sample.text)
        if answer is None:
            return self._wrong_format(f"expected {_WANTED.get(self._scorer.place, 'an answer')}, found none")
        return answer

    def _choice(self, text: str) -> str | Score:
        letters = self._scorer.choices
        alone = extraction.letter_alone(text, letters)
        stated = alone if alone is not None or "prose" not in self._lenient else extraction.choice(text, letters)
        if stated is None:
            return self._wrong_format(f"expected {_WANTED['choice']}, found none")
        return stated if alone is not None else f"{stated} {_STATED}"

    async def _scores(self, reference: str, answers: Iterable[str]) -> dict[str, Score]:
        scores: dict[str, Score] = {}
        slow: dict[str, asyncio.Task[Score]] = {}
        share = Share()
        async with asyncio.TaskGroup() as comparing:
            for answer in dict.fromkeys(answers):
                score = await self._turns.take(partial(self._score_at_once, reference, answer))
                if score is None:
                    slow[answer] = comparing.create_task(self._compare(reference, answer, share))
                else:
                    scores[answer] = score
        return scores | {answer: task.result() for answer, task in slow.items()}

    def _score_at_once(self, reference: str, answer: str) -> Score | None:
        if self._scorer.place == "choice":
            letter, _, stated = answer.partition(" ")
            return self._judged(letter == reference, letter, ("prose",) if stated else ())
        if self._library:
            return self._remembered.get(reference, answer)
        if answer == reference or self._scorer.mode == "exact":
            return self._judged(answer == reference, answer)
        attempts = self._attempts(reference, answer)
        if (complaint := self._unreadable(answer, attempts)) is not None:
            return self._wrong_format(complaint)
        for attempt in attempts:
            equalities = [self._equal_here(*pair) for pair in attempt.pairs]
            if _DIFFERENT in equalities:
                continue
            if None in equalities:
                return self._remembered.get(reference, answer)
            rules = {equality.rule for equality in equalities if equality is not None} - {""}
            return self._judged(True, answer, tuple(sorted(attempt.rules | rules)))
        return self._judged(False, answer)

    def _unreadable(self, answer: str, attempts: tuple[Attempt, ...]) -> str | None:
        if self._scorer.mode == "numeric":
            given = [pair[1] for attempt in attempts for pair in attempt.pairs]
            is_short = len(answer) <= _LONGEST_COMPLETION  # reading a text of any length would hold the event loop
            numeric = (is_short and _is_number(answer)) or any(plain_numbers.read(text) is not None for text in given)
            return None if numeric else f"expected a number, found {answer[:80]!r}"
        if len(answer) > matching.LONGEST_FORMULA and not attempts:
            return f"expected a formula of at most {matching.LONGEST_FORMULA} characters, or a sentence that states one"
        return None

    def _attempts(self, reference: str, answer: str) -> tuple[Attempt, ...]:
        try:
            return matching.attempts(reference, answer, self._lenient)
        except Exception as error:  # noqa: BLE001 (no completion may end the service; a process has the last word)
            log.warning("an answer is left to computer algebra", extra={"error": repr(error)})
            return (Attempt(((reference, answer[: matching.LONGEST_FORMULA]),)),)

    def _equal_here(self, reference: str, answer: str) -> Equality | None:
        try:
            return self._equal_plainly(reference, answer)
        except Exception as error:  # noqa: BLE001 (no completion may end the service; a process has the last word)
            log.warning("an answer is left to computer algebra", extra={"error": repr(error)})
            return None

    def _equal_plainly(self, reference: str, answer: str) -> Equality | None:
        if reference == answer:
            return Equality(True)
        expected, given = plain_numbers.read(reference), plain_numbers.read(answer)
        if expected is not None and given is not None:
            if expected.share == given.share:
                return Equality(True)
            if plain_numbers.close(expected, given, self._tolerance):
                return Equality(True, "tolerance")
            whole = "whole" in self._lenient and plain_numbers.close(expected, given, self._tolerance, whole=True)
            return Equality(True, "whole") if whole else _DIFFERENT
        return _DIFFERENT if self._scorer.mode == "numeric" else None

    async def _compare(self, reference: str, answer: str, share: Share) -> Score:
        try:
            score = await self._compare_slowly(reference, answer, share)
        except Overdue as error:
            score = valued(self.name, ScoreStatus.TIMEOUT, 0.0, str(error))
        except Crashed as error:
            score = valued(self.name, ScoreStatus.CRASHED, 0.0, str(error))
        except TemporaryError as error:
            return unavailable(self.name, str(error))
        self._remembered.put(score, reference, answer)
        return score

    async def _compare_slowly(self, reference: str, answer: str, share: Share) -> Score:
        score = self._judged(False, answer)
        if self._library:
            text = answer if self._scorer.place == "auto" else rf"\boxed{{{answer}}}"
            equality = await self._ask({"reference": reference, "completion": text}, share)
            return equality if isinstance(equality, Score) else self._judged(equality.equal, answer)
        for attempt in self._attempts(reference, answer):
            rules = set(attempt.rules)
            for pair in attempt.pairs:
                equality = self._equal_here(*pair) or await self._ask(self._question(*pair), share)
                if isinstance(equality, Score):
                    score = equality
                    break
                if not equality.equal:
                    break
                rules |= {equality.rule} - {""}
            else:
                return self._judged(True, answer, tuple(sorted(rules)))
        return score

    def _question(self, reference: str, answer: str) -> dict[str, Json]:
        return {"reference": reference, "answer": answer, "tolerance": float(self._tolerance)}

    async def _ask(self, question: dict[str, Json], share: Share) -> Equality | Score:
        verdict = await self._processes.ask(question, self._timeout_s, share)
        if verdict.get("status") != "ok":
            return valued(self.name, ScoreStatus(str(verdict.get("status"))), 0.0, str(verdict.get("detail")))
        return Equality(verdict.get("equal") is True, "tolerance" if verdict.get("rounded") is True else "")

    def _judged(self, equal: bool, answer: str, rules: tuple[str, ...] = ()) -> Score:
        score = valued(self.name, ScoreStatus.OK, float(equal), "" if equal else f"found {answer[:80]!r}")
        return dataclasses.replace(score, lenient=rules) if equal and rules else score

    def _wrong_format(self, detail: str) -> Score:
        return valued(self.name, ScoreStatus.WRONG_FORMAT, 0.0, detail)


def _is_number(text: str) -> bool:
    return plain_numbers.read(text) is not None or plain_numbers.read(matching.read(plain(text)).core) is not None
