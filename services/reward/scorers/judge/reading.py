"""Find the verdict in a judge's answer: the program of a reading process.

::

    arguments  {"pattern": "…"} or {"json_field": "score"}
    question   {"answer": "… score: 7"}                          answer   {"verdict": "7"}, or null

A completion can steer the judge's answer, and a pattern can run for ever on it, holding the GIL.
"""

import json
import re
import sys
from collections.abc import Callable
from functools import partial

import regex

from penstock.services.reward.subprocess_pool import child

LONGEST_ANSWER = 20_000
"""In characters; only the end of a longer answer is read."""
_LONGEST_VERDICT = 1_000
_MOST_OBJECTS = 200
"""Maximum opening braces, from the end, tried as the verdict's start."""
_MEMORY_BYTES = 1024**3


def make_read(rules: dict[str, str]) -> Callable[[str], object]:
    """Return a function that returns an answer's verdict, or None. Raises regex.error."""
    if "json_field" in rules:
        find: Callable[[str], object] = partial(_field, rules["json_field"])
    else:
        find = partial(_last_group, regex.compile(rules["pattern"]))
    return lambda answer: _bounded(find(answer[-LONGEST_ANSWER:]))


def _bounded(verdict: object) -> object:
    if isinstance(verdict, str):
        return verdict if len(verdict) <= _LONGEST_VERDICT else None
    return verdict if isinstance(verdict, bool | int | float) else None


def _last_group(pattern: "regex.Pattern[str]", answer: str) -> str | None:
    verdict = None
    for match in pattern.finditer(answer):
        verdict = match[1]
    return verdict


def _field(name: str, answer: str) -> object:
    decoder = json.JSONDecoder()
    for start in [match.start() for match in re.finditer(r"\{", answer)][: -_MOST_OBJECTS - 1 : -1]:
        try:
            value, _ = decoder.raw_decode(answer, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and name in value:
            return value[name]
    return None


def _prepare() -> child.Answerer:
    read = make_read(json.loads(sys.argv[1]))
    return lambda question: {"verdict": read(question["answer"])}


if __name__ == "__main__":
    child.serve(_prepare, parent=int(sys.argv[2]), memory_bytes=_MEMORY_BYTES, computes=True)
