"""Explain what is wrong with a setting, in the words of the TOML file."""

import dataclasses
import difflib
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from penstock.shared.settings.reading.other_names import fits, meaning_elsewhere
from penstock.shared.settings.reading.replaced import replacement
from penstock.shared.settings.root import Settings
from penstock.shared.text.redaction import redacted

_FORMS = {
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "string_type": "text",
}
_MOST_HINTS, _MOST_HOMES = 8, 3
_TYPING_ERROR, _SHORT_TYPING_ERROR = 0.85, 0.75
"""How similar two names are then, by difflib's ratio, and two short names of one table."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One of pydantic's errors."""

    key: str
    """The setting, without the names of unions' members."""
    models: Sequence[type[BaseModel]]
    """The tables that may be around it."""
    type: str
    message: str
    input: object
    context: Mapping[str, Any]

    @property
    def is_of_form(self) -> bool:
        """Whether it is about the form of a value, not its parts: a list with a wrong item also counts as too short."""
        return self.type == "too_short" or self.type in _FORMS


def located(error: Mapping[str, Any]) -> Problem:
    """Return an error with its place in the settings."""
    tables: list[str] = []
    models: Sequence[type[BaseModel]] = [Settings]
    around, inside = models, models
    chosen = False
    for part in error["loc"]:
        of_kind = [] if chosen else [model for model in inside if part in _kinds(model)]
        if of_kind:
            inside, chosen = of_kind, True
        elif "[" not in str(part):  # else a member of a union
            tables.append(str(part))
            around, chosen = inside, False
            inside = inside if isinstance(part, int) else [table for model in inside for table in _field(model, part)]
    is_item = error["type"] in ("union_tag_invalid", "union_tag_not_found")
    models = inside if is_item else around
    return Problem(".".join(tables), models, error["type"], error["msg"], error["input"], error.get("ctx", {}))


def explanation(problems: Sequence[Problem]) -> str:
    """Return the sentence about the problems of one setting."""
    first, key = problems[0], problems[0].key
    table, _, name = key.rpartition(".")
    given = redacted(repr(first.input))
    match first.type:
        case "value_error":
            return redacted(str(first.context["error"]))
        case "extra_forbidden" if instead := replacement(
            key, [kind for model in first.models for kind in _kinds(model)]
        ):
            return f"{key} no longer exists: use {instead}, or leave it out"
        case "extra_forbidden":
            known = list(dict.fromkeys(field for model in first.models for field in model.model_fields))
            return f"{key}: expected a known setting, found {name!r}; {_hint(key, first.input, known)}"
        case "missing" if name.isdecimal():
            return f"{table}: expected {int(name) + 1} or more items, found {given}: change {table}"
        case "missing":
            return f"{key}: expected a value, but it is not set: add it"
        case "union_tag_not_found":
            return f"{key}: expected {_known_kinds(first)} as the kind, but it is not set: add kind"
        case "union_tag_invalid":
            close = difflib.get_close_matches(first.context["tag"], _all_kinds(first), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            return (
                f"{key}: expected {_known_kinds(first)} as the kind, found {first.context['tag']!r}{hint}: change kind"
            )
    expected = " or ".join(dict.fromkeys(map(_expectation, problems)))
    return f"{key}: expected {expected}, found {given}: change {key}"


def meant(key: str, known: Sequence[str] = ()) -> str:
    """Return what an unknown ``key`` may be: another framework's name, a typing error, or a name of another table; else ""."""
    table, _, name = key.replace("-", "_").rpartition(".")
    if elsewhere := meaning_elsewhere(key):
        return elsewhere
    typed = difflib.get_close_matches(name, known, n=1, cutoff=_TYPING_ERROR)
    homes = [home for home in _homes(name, exactly=bool(table)) if fits(key, home)]
    meanings = typed or homes or difflib.get_close_matches(name, known, n=1, cutoff=_SHORT_TYPING_ERROR)
    meanings = meanings or [each for each in known if set(name.split("_")) < set(each.split("_"))]
    return f"did you mean {' or '.join(map(repr, meanings[:_MOST_HOMES]))}?" if meanings else ""


def _hint(key: str, given: object, known: Sequence[str]) -> str:
    if hints := list(dict.fromkeys(_elsewhere(key, given))):
        return "; ".join(hints[:_MOST_HINTS])
    if isinstance(given, Mapping):  # no setting, but a table
        close = difflib.get_close_matches(key.rpartition(".")[2], known, n=1, cutoff=_SHORT_TYPING_ERROR)
        meaning = f"did you mean {close[0]!r}?" if close else ""
    else:
        meaning = meant(key, known)
    return meaning or f"known here: {', '.join(known)}"


def _elsewhere(key: str, value: object) -> Iterator[str]:
    """Yield what other frameworks' names mean; of a table, those in it."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _elsewhere(f"{key}.{name}", part)
    elif meaning := meaning_elsewhere(key):
        yield meaning


def _homes(name: str, *, exactly: bool) -> list[str]:
    """Return the settings called ``name`` or, unless ``exactly``, so that it is a typing error; not those of a list's items."""
    by_name: dict[str, list[str]] = {}
    for setting in _all_settings(Settings):
        by_name.setdefault(setting.rpartition(".")[2], []).append(setting)
    close = [] if exactly else difflib.get_close_matches(name, by_name, n=1, cutoff=_TYPING_ERROR)
    return by_name.get(name) or (by_name[close[0]] if close else [])


def _all_settings(model: type[BaseModel]) -> Iterator[str]:
    for field, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from (f"{field}.{inner}" for inner in _all_settings(info.annotation))
        else:
            yield field


def _expectation(problem: Problem) -> str:
    name = problem.key.rpartition(".")[2]
    tables = [table for model in problem.models for table in _field(model, name)]
    if problem.type.startswith("model_") and len(tables) == 1:
        fields = [f"{problem.key}.{field}" for field in tables[0].model_fields]
        return f"a table ({', '.join(fields[:_MOST_HINTS])}{', …' if fields[_MOST_HINTS:] else ''})"
    if problem.type in _FORMS:
        return _FORMS[problem.type] + (_example(problem, name) if _FORMS[problem.type] == "a list" else "")
    if problem.type == "too_short":
        return f"{problem.context['min_length']} or more items"
    if problem.type == "string_pattern_mismatch":
        return f"text of the form {problem.context['pattern']}"
    message = problem.message
    for start in ("Input should be ", "Value should be "):
        if message.startswith(start):
            return message.removeprefix(start)
    return message[:1].lower() + message[1:]


def _example(problem: Problem, name: str) -> str:
    """Return how a list is written: its default or, if that is empty, what was given as its item."""
    fields = [model.model_fields[name] for model in problem.models if name in model.model_fields]
    default = fields[0].default if len(fields) == 1 else None
    given = [problem.input] if isinstance(problem.input, str | int | float) else []
    items = list(default) if isinstance(default, tuple) and default else given
    if not items or any(table for field in fields for table in _tables(field.annotation)):
        return ""
    if isinstance(problem.input, str) and problem.input.startswith("["):
        return ", with quotes around it for the shell"
    return f" such as {redacted(json.dumps(items, ensure_ascii=False))}"


def _known_kinds(problem: Problem) -> str:
    return ", ".join(map(repr, _all_kinds(problem)))


def _all_kinds(problem: Problem) -> list[str]:
    return [kind for model in problem.models for kind in _kinds(model)]


def _kinds(model: type[BaseModel]) -> tuple[str, ...]:
    field = model.model_fields.get("kind")
    return () if field is None else typing.get_args(field.annotation)


def _field(model: type[BaseModel], name: str) -> Iterator[type[BaseModel]]:
    """Yield the tables that the field ``name`` may hold."""
    field = model.model_fields.get(name)
    yield from () if field is None else _tables(field.annotation)


def _tables(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _tables(inner)
