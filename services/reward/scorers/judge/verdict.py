"""Fill the judge's template and parse its verdict.

The template is filled in one pass, so braces in completions, and unknown ones (``{"score": 7}``), stay text.
"""

import json
import math
import re

import regex

from shared.bus.messages import Prompt
from shared.errors import PermanentError, SettingsError
from shared.settings.rewards.scorers import JudgeScorer

_PLACE = re.compile(r"\{(prompt|completion|answer|extra\.(?P<column>[^{}\s]+))\}")
_PATTERN_TIMEOUT_S = 0.5
_LONGEST_ANSWER = 20_000
"""In characters; only the end of a longer answer is read."""
_MOST_OBJECTS = 200
"""Maximum opening braces, from the end, tried as the verdict's start."""


def fill(template: str, prompt: Prompt, completion: str) -> str:
    """Fill in prompt, completion, answer and columns. Raises PermanentError if one is missing."""

    def value(place: re.Match[str]) -> str:
        match place[1]:
            case "prompt":
                return _text(prompt)
            case "completion":
                return completion
            case "answer":
                return _known(prompt.answer, "an answer", prompt)
        return _known(prompt.extra.get(place["column"]), f"the column {place['column']!r}", prompt)

    return _PLACE.sub(value, template)


def _text(prompt: Prompt) -> str:
    if prompt.messages is None:
        return prompt.text or ""
    return "\n\n".join(f"{turn.role}: {turn.content}" for turn in prompt.messages)


def _known(value: object, what: str, prompt: Prompt) -> str:
    if value is None:
        raise PermanentError(
            f"the judge's template needs {what} of {prompt.problem}, which is empty: "
            "change the data, or template in [[reward.scorers]]"
        )
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class VerdictReader:
    """Read a value from a judge's answer. Raises SettingsError for a pattern without a group."""

    def __init__(self, scorer: JudgeScorer) -> None:
        self._scorer = scorer
        labels = scorer.scale if isinstance(scorer.scale, dict) else {}
        self._labels = {label.strip().lower(): value for label, value in labels.items()}
        if scorer.json_field:
            return
        try:
            self._pattern = regex.compile(scorer.pattern)
        except regex.error as error:
            raise self._refused(f"{scorer.pattern!r} ({error})") from error
        if self._pattern.groups < 1:
            raise self._refused(f"{scorer.pattern!r}, which has no group")

    def _refused(self, actual: str) -> SettingsError:
        return SettingsError(
            f"expected a regular expression with a group as pattern of scorer {self._scorer.name!r}, found {actual}: "
            "change pattern in [[reward.scorers]]"
        )

    def read(self, answer: str) -> float | None:
        """Return the value, 0 to 1 or a label's; None without a verdict. Runs in a thread."""
        answer = answer[-_LONGEST_ANSWER:]
        verdict = self._field(answer) if self._scorer.json_field else self._match(answer)
        scale = self._scorer.scale
        if isinstance(scale, dict):
            return self._labels.get(str(verdict).strip().lower()) if isinstance(verdict, str | bool) else None
        number = _number(verdict)
        low, high = scale
        return None if number is None or not low <= number <= high else (number - low) / (high - low)

    def _match(self, answer: str) -> str | None:
        verdict_text = None
        try:
            for match in self._pattern.finditer(answer, timeout=_PATTERN_TIMEOUT_S, concurrent=True):
                verdict_text = match[1]
        except TimeoutError:
            return None
        return verdict_text

    def _field(self, answer: str) -> object:
        decoder = json.JSONDecoder()
        for start in [match.start() for match in re.finditer(r"\{", answer)][: -_MOST_OBJECTS - 1 : -1]:
            try:
                value, _ = decoder.raw_decode(answer, start)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict) and self._scorer.json_field in value:
                return value[self._scorer.json_field]
        return None


def _number(verdict: object) -> float | None:
    if isinstance(verdict, bool) or not isinstance(verdict, int | float | str):
        return None
    try:
        number = float(verdict)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
