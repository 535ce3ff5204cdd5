"""Fill the judge's template and parse its verdict.

The template is filled in one pass, so braces in completions, and unknown ones (``{"score": 7}``), stay text.
"""

import json
import math
import re
import sys

import regex

from penstock.services.reward.scorers.judge.reading import LONGEST_ANSWER
from penstock.services.reward.subprocess_pool.pool import Crashed, Overdue, Processes
from penstock.shared.bus import transcripts
from penstock.shared.bus.messages import Prompt, Sample
from penstock.shared.errors import PermanentError, SettingsError
from penstock.shared.settings.rewards.scorers import JudgeScorer

_PLACE = re.compile(r"\{(prompt|completion|transcript|answer|extra\.(?P<column>[^{}\s]+))\}")
TIMEOUT_S = 0.5
"""CPU time of reading one answer."""
_COMMAND = (sys.executable, "-m", "penstock.services.reward.scorers.judge.reading")


def fill(template: str, prompt: Prompt, sample: Sample) -> str:
    """Fill in prompt, completion, transcript, answer and columns. Raises PermanentError if one is missing."""

    def value(place: re.Match[str]) -> str:
        match place[1]:
            case "prompt":
                return _text(prompt)
            case "completion":
                return sample.text
            case "transcript":
                return _transcript(prompt, sample)
            case "answer":
                return _known(prompt.answer, "an answer", prompt)
        return _known(prompt.extra.get(place["column"]), f"the column {place['column']!r}", prompt)

    return _PLACE.sub(value, template)


def _transcript(prompt: Prompt, sample: Sample) -> str:
    conversation = transcripts.read(sample)
    if conversation is None:
        return f"{_text(prompt)}\n\nassistant: {sample.text}"
    return transcripts.text([*conversation.prompt, *conversation.completion])


def _text(prompt: Prompt) -> str:
    if prompt.messages is None:
        return prompt.text or ""
    return "\n\n".join(f"{turn.role}: {turn.content}" for turn in prompt.messages)


def _known(value: object, field: str, prompt: Prompt) -> str:
    if value is None:
        raise PermanentError(
            f"the judge's template needs {field} of {prompt.problem}, which is empty: "
            "change the data, or template in [[reward.scorers]]"
        )
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class VerdictReader:
    """Read a value from a judge's answer, in a killable process. Raises SettingsError for a pattern without a group."""

    def __init__(self, scorer: JudgeScorer) -> None:
        self._scorer = scorer
        labels = scorer.scale if isinstance(scorer.scale, dict) else {}
        self._labels = {label.strip().lower(): value for label, value in labels.items()}
        self.rules = {"json_field": scorer.json_field} if scorer.json_field else {"pattern": scorer.pattern}
        self._processes = Processes((*_COMMAND, json.dumps(self.rules)), 1, scorer.name, computes=True)
        if not scorer.json_field:
            self._check_pattern()

    def _check_pattern(self) -> None:
        try:
            groups = regex.compile(self._scorer.pattern).groups
        except regex.error as error:
            raise self._refused(f"{self._scorer.pattern!r} ({error})") from error
        if groups < 1:
            raise self._refused(f"{self._scorer.pattern!r}, which has no group")

    def _refused(self, actual: str) -> SettingsError:
        return SettingsError(
            f"expected a regular expression with a group as pattern of scorer {self._scorer.name!r}, found {actual}: "
            "change pattern in [[reward.scorers]]"
        )

    async def close(self) -> None:
        await self._processes.close()

    async def read(self, answer: str) -> float | None:
        """Return the value, 0 to 1 or a label's; None without a verdict, or if reading took too long."""
        try:
            return self.value((await self._processes.ask({"answer": answer[-LONGEST_ANSWER:]}, TIMEOUT_S))["verdict"])
        except (Overdue, Crashed):
            return None

    def value(self, verdict: object) -> float | None:
        scale = self._scorer.scale
        if isinstance(scale, dict):
            return self._labels.get(str(verdict).strip().lower()) if isinstance(verdict, str | bool) else None
        number = _number(verdict)
        low, high = scale
        return None if number is None or not low <= number <= high else (number - low) / (high - low)


def _number(verdict: object) -> float | None:
    if isinstance(verdict, bool) or not isinstance(verdict, int | float | str):
        return None
    try:
        number = float(verdict)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
