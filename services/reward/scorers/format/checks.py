r"""Check text against a pattern or a JSON schema: the program of a checking process.

::

    question   {"texts": [["pattern", "…"], ["json", "{\"answer\": 7}"]]}
    answer     {"broken": ["", "how it breaks the rule"]}

A pattern or ``uniqueItems`` can run for ever on a model's text, holding the GIL.
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import regex

from penstock.services.reward.subprocess_pool import child

LONGEST = 100_000
"""In characters; longer text is not read."""
_MEMORY_BYTES = 1024**3
_LONGEST_SENTENCE = 160


def make_check(schema: Mapping[str, Any]) -> Callable[[str], str]:
    """Raises ValueError: not a JSON schema, or an external reference."""
    from jsonschema import exceptions, validators
    from referencing import Registry

    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except exceptions.SchemaError as error:
        raise ValueError(f"{error.message} at {error.json_path}") from error
    outside = [reference for reference in _references(schema) if not reference.startswith("#")]
    if outside:
        raise ValueError(f"a reference to something outside the schema: {outside[0]!r}")
    validator = kind(schema, registry=Registry())

    def check(text: str) -> str:
        if len(text) > LONGEST:
            return f"expected JSON of at most {LONGEST} characters, found {len(text)}"
        try:
            value = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            return f"expected JSON, found {type(error).__name__}: {error}"[:_LONGEST_SENTENCE]
        try:
            problem = next(validator.iter_errors(value), None)
        except RecursionError:
            return "the JSON is nested too deeply"
        if problem is None:
            return ""
        return f"the JSON violates the schema at {problem.json_path}: {problem.message}"[:_LONGEST_SENTENCE]

    return check


def _references(schema: object) -> list[str]:
    if isinstance(schema, Mapping):
        own = [value for key, value in schema.items() if key in ("$ref", "$dynamicRef") and isinstance(value, str)]
        return own + [reference for value in schema.values() for reference in _references(value)]
    if isinstance(schema, list):
        return [reference for value in schema for reference in _references(value)]
    return []


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name that occurs twice in an object")
    return members


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant}, which is no JSON")


def make_match(pattern: str) -> Callable[[str], str]:
    """Return a function that returns "" if ``pattern`` matches the whole text."""
    compiled = compile_pattern(pattern)
    return lambda text: "" if compiled.fullmatch(text) else "expected text that matches the pattern"


def compile_pattern(pattern: str) -> "regex.Pattern[str]":
    return regex.compile(pattern, regex.DOTALL)


def _prepare() -> child.Answerer:
    rules = json.loads(sys.argv[1])
    checks = {"pattern": make_match(rules["pattern"])} if "pattern" in rules else {}
    if "json" in rules:
        checks["json"] = make_check(rules["json"])
    return lambda question: {"broken": [checks[check](text) for check, text in question["texts"]]}


if __name__ == "__main__":
    child.serve(_prepare, parent=int(sys.argv[2]), memory_bytes=_MEMORY_BYTES, computes=True)
