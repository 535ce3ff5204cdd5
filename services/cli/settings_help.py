"""Explain the settings from their models.

``python -m penstock.services.cli.settings_help docs/reference/settings.md`` writes the reference page.
"""

import ast
import dataclasses
import functools
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from penstock.shared.settings import Settings
from penstock.shared.settings.algorithm import PRESETS

COMMON = (
    "run.steps", "run.device",
    "bus.url",
    "policy.model", "policy.dtype", "policy.lora.rank",
    "data.path",
    "evaluation.path", "evaluation.every_steps",
    "sampling.group_size", "sampling.max_new_tokens", "sampling.temperature",
    "rollout.engine", "rollout.replicas", "rollout.gpus",
    "reward.scorers", "reward.expression",
    "algorithm.preset", "algorithm.groups_per_step", "algorithm.max_lag",
    "trainer.gpus", "trainer.zero_stage", "trainer.learning_rate", "trainer.micro_batch_tokens",
    "trainer.checkpoint_every_steps",
)  # fmt: skip
_INTERNAL = "internal"
_WIDTH, _NAME_WIDTH, _BRIEF_WIDTH = 100, 41, 58
_SHARED = ("kind", "name")
"""Settings of every scorer kind, listed once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    key: str
    kind: str
    default: str
    text: str

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def brief(self) -> str:
        text = self.text.split(". ")[0]
        if len(text) > _BRIEF_WIDTH:
            text = re.sub(r" \([^)]*\)", "", text)
        while len(text) > _BRIEF_WIDTH and (parts := re.split(r"[:;,] ", text))[1:]:
            text = text[: -len(parts[-1])].rstrip(" :;,")
        return text.rstrip(".")


def entries(*, internal: bool = False) -> list[Entry]:
    return [entry for entry in _of(Settings, "") if internal or not entry.key.startswith(f"{_INTERNAL}.")]


def matching(name: str) -> list[Entry]:
    every = entries(internal=True)
    within = [entry for entry in every if re.match(rf"{_any_kinds(name)}([.\[]|$)", entry.key)]
    return within or [entry for entry in every if name in entry.key]


def _any_kinds(name: str) -> str:
    """Return the pattern of a setting's name, which may be one of several kinds: `[judge]` is `[model|judge]` too."""
    return re.sub(r"\\\[(\w+)\\\]", r"\\[([\\w|]+\\|)?\1(\\|[\\w|]+)?\\]", re.escape(name))


def show_common(console: Console) -> None:
    every = {entry.key: entry for entry in entries() if entry.kind}
    for section, group in groupby((every[key] for key in COMMON), lambda entry: entry.key.partition(".")[0]):
        console.print(Text(f"\n[{section}]", style="bold"))
        for entry in group:
            name = _shortened(f"{entry.key} = {entry.default}")
            console.print(
                Text(f"{name:<{_NAME_WIDTH}}", style="cyan").append(f" {entry.brief}", style="default"), soft_wrap=True
            )
    sections = [f"{name} ({len(list(group))})" for name, group in groupby(every.values(), lambda entry: entry.section)]
    console.print(
        f"\n{len(every)} settings, by section: {', '.join(sections)}.\n"
        "`penstock settings SECTION` or `penstock settings NAME` explains them, `penstock settings --all` explains all.",
        width=_WIDTH,
        highlight=False,
        markup=False,
    )


def show(chosen: Sequence[Entry], console: Console) -> None:
    for section, group in groupby(chosen, lambda entry: entry.section):
        console.print(Text(f"\n[{section}]", style="bold"))
        for entry in group:
            line = Text(entry.key, style="cyan")
            if entry.kind:
                line.append(f"  {entry.kind}{_assigned(entry)}", style="dim")
            console.print(line, soft_wrap=True)
            console.print(Padding(Text(entry.text), (0, 0, 0, 4)))


def markdown() -> str:
    lines = [
        "# Settings",
        "",
        "Every setting, by section of the run's TOML file. Environment variables (`PENSTOCK__TRAINER__RANKS=2`) override the",
        "file, and flags (`--trainer.ranks 2`) override both. `penstock settings` shows the common ones. This page is written by",
        "`python -m penstock.services.cli.settings_help docs/reference/settings.md`;",
        "[Algorithms](../algorithms.md#presets) has the presets.",
    ]
    listed = [entry for entry in entries() if entry.kind]
    for section, group in groupby(listed, lambda entry: entry.section):
        lines += ["", f"## {section}", "", "| setting | default | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{_cell(entry.key)}` | {_default_cell(entry)} | {_cell(entry.text)} |" for entry in group]
    return "\n".join(lines) + "\n"


def _assigned(entry: Entry) -> str:
    return f" = {entry.default}" if entry.default else "  (no default)"


def _shortened(text: str) -> str:
    return text if len(text) < _NAME_WIDTH else f"{text[: _NAME_WIDTH - 2]}…"


def _cell(text: str) -> str:
    """Return a text as a table's cell; in code, which is every second part, ``<`` is no markup.

    >>> _cell("a < b, `a < b`")
    'a &lt; b, `a < b`'
    """
    parts = text.replace("|", "\\|").replace("\n", " ").split("`")
    return "`".join(part if place % 2 else part.replace("<", "&lt;") for place, part in enumerate(parts))


def _default_cell(entry: Entry) -> str:
    default = entry.default.replace("\n", "\\n").replace("|", "\\|")
    return f"`{default}`" if default else ""


def _of(model: type[BaseModel], prefix: str, without: Sequence[str] = ()) -> Iterator[Entry]:
    fields = sorted(model.model_fields.items(), key=lambda item: bool(_models(item[1].annotation)))
    for name, field in fields:
        parts = _models(field.annotation)
        if name in without:
            continue
        if parts == [field.annotation]:
            yield from _of(parts[0], f"{prefix}{name}.")
            continue
        text = _meaning(model, name)
        yield Entry(f"{prefix}{name}", _kind(field.annotation), _default(field, bool(parts)), text)
        if f"{prefix}{name}" == "algorithm.preset":
            yield from _presets()
        yield from _of_parts(f"{prefix}{name}", parts)


def _meaning(model: type[BaseModel], name: str) -> str:
    """Return the docstring of a setting."""
    section = next(base for base in model.__mro__ if name in inspect.get_annotations(base))
    return " ".join(_docstrings(section).get(name, "").split())


@functools.cache
def _docstrings(section: type) -> dict[str, str]:
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    return {
        setting.target.id: text.value.value
        for setting, text in pairwise(body.body)
        if isinstance(setting, ast.AnnAssign) and isinstance(setting.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def _of_parts(key: str, parts: Sequence[type[BaseModel]]) -> Iterator[Entry]:
    kinds = [_literal(part) for part in parts]
    if not any(kinds):
        for part in parts:
            yield from _of(part, f"{key}[].")
        return
    each = " | ".join(repr(value) for kind in kinds for value in kind.split("|"))
    yield Entry(f"{key}[].kind", each, "", "The kind; its settings follow.")
    yield Entry(f"{key}[].name", "text", "the kind", _meaning(parts[0], "name"))
    of_kinds: dict[Entry, list[str]] = {}
    for part, kind in zip(parts, kinds, strict=True):
        for entry in _of(part, "", without=_SHARED):
            of_kinds.setdefault(entry, []).append(kind)
    for names in dict.fromkeys(sorted(map(tuple, of_kinds.values()), key=len, reverse=True)):
        for entry in [entry for entry, of_entry in of_kinds.items() if tuple(of_entry) == names]:
            yield dataclasses.replace(entry, key=f"{key}[{'|'.join(names)}].{entry.key}")


def _presets() -> Iterator[Entry]:
    for preset, overrides in PRESETS.items():
        sets = ", ".join(f"{name} = {json.dumps(value)}" for name, value in overrides.items())
        yield Entry(f'algorithm.preset = "{preset}"', "", "", f"sets {sets}" if sets else "the defaults below")


def _models(annotation: object) -> list[type[BaseModel]]:
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
        kinds = [f'{{kind = "{scorer.kind}"}}' for scorer in value] if isinstance(value, tuple) else ["…"]
        return f"[{', '.join(kinds)}]"
    if value is None:
        return '""'
    if isinstance(value, tuple):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, (str, Path)) else str(value)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
