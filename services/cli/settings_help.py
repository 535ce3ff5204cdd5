"""Say what every setting is: its name, type, default and docstring, from the models themselves."""

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from shared.settings import Settings
from shared.settings.algorithm import PRESETS


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One setting."""

    key: str
    kind: str
    default: str
    text: str


def entries() -> list[Entry]:
    """Return every setting, in the order of the file."""
    return list(_of(Settings, ""))


def show(found: Sequence[Entry], console: Console) -> None:
    """Print settings for people."""
    table = ""
    for entry in found:
        head = entry.key.rpartition(".")[0]
        if head != table:
            table = head
            console.print(Text(f"\n[{head}]", style="bold"))
        line = Text(entry.key, style="cyan")
        if entry.kind:
            line.append(f"  {entry.kind}", style="dim").append(
                f" = {entry.default}" if entry.default else "  (no default)"
            )
        console.print(line, soft_wrap=True)
        console.print(Padding(Text(entry.text), (0, 0, 0, 4)))


def _of(model: type[BaseModel], prefix: str) -> Iterator[Entry]:
    fields = sorted(model.model_fields.items(), key=lambda item: bool(_models(item[1].annotation)))
    for name, field in fields:
        parts = _models(field.annotation)
        if parts == [field.annotation]:
            yield from _of(parts[0], f"{prefix}{name}.")
            continue
        text = " ".join((field.description or "").split())
        yield Entry(f"{prefix}{name}", _kind(field.annotation), _default(field, bool(parts)), text)
        if f"{prefix}{name}" == "algorithm.preset":
            yield from _presets()
        for part in parts:
            kind = _literal(part)
            yield from _of(part, f"{prefix}{name}[{kind}]." if kind else f"{prefix}{name}[].")


def _presets() -> Iterator[Entry]:
    for preset, overrides in PRESETS.items():
        sets = ", ".join(f"{name} = {json.dumps(value)}" for name, value in overrides.items())
        yield Entry(f'algorithm.preset = "{preset}"', "", "", f"sets {sets}" if sets else "the defaults below")


def _models(annotation: object) -> list[type[BaseModel]]:
    """Return the tables that a setting holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in typing.get_args(annotation) for model in _models(inner)]


def _literal(model: type[BaseModel]) -> str:
    field = model.model_fields.get("kind")
    return "" if field is None else "|".join(str(value) for value in typing.get_args(field.annotation))


def _kind(annotation: object) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(repr(value) for value in typing.get_args(annotation))
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return " | ".join(_kind(part) for part in typing.get_args(annotation) if part is not type(None))
    if _models(annotation):
        return "tables"
    if typing.get_origin(annotation) is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is dict:
        return "table"
    names = {str: "text", Path: "path", bool: "true | false", int: "integer", float: "number"}
    return next((name for kind, name in names.items() if annotation is kind), "list")


def _default(field: FieldInfo, holds_tables: bool) -> str:
    if field.is_required():
        return ""
    value = field.default
    if holds_tables:
        return f"[{len(value)}]" if isinstance(value, tuple) else "…"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, (str, Path)) else str(value)
