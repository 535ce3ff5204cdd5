"""What of a run's settings may leave the machine: an allow-list for what people read, a check of what is copied whole."""

import enum
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

from penstock.shared.errors import SettingsError
from penstock.shared.settings.root import Settings
from penstock.shared.text.redaction import SECRET_NAME, holds_secret

_NAME = re.compile(r"(hf://)?[\w.-]+(/[\w.-]+)?(@[\w./-]+)?(:[\w./-]+)?")
_FORMS = {
    "policy.model": _NAME,
    "data.path": _NAME,
    "reward.expression": re.compile(r"[\w\s.,()<>=!+*/%-]*"),
    "algorithm.advantage": re.compile(r"\w+"),
    "algorithm.loss": re.compile(r"\w+"),
}
"""Texts that are published if they have this form; of a path, the last part is."""


def published(settings: Settings, sections: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the settings that differ from their defaults and are numbers, choices, or texts of ``_FORMS``.

    All other texts stay: they may hold prompts, addresses, paths and keys.

    Args:
        sections: tables to include; empty: all.
    """
    return {name: table for name, table in _of_table(settings, "").items() if not sections or name in sections}


def public_text(key: str, text: str) -> str | None:
    """Return a text setting as it may be published, if it may."""
    form = _FORMS.get(key)
    if form is None or "//" in text.removeprefix("hf://"):
        return None
    if form is _NAME and not text.startswith("hf://") and (text.startswith(("/", ".", "~")) or text.count("/") > 1):
        text = PurePath(text).name
    return text if form.fullmatch(text) else None


def _of_table(table: BaseModel, key: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, field in type(table).model_fields.items():
        value, inner = getattr(table, name, None), f"{key}.{name}" if key else name
        is_default = not field.is_required() and value == field.get_default(call_default_factory=True)
        public = None if is_default and name != "kind" else _of_value(value, field.annotation, inner)
        if public is not None:
            values[name] = public
    return values


def _of_value(value: object, annotation: object, key: str) -> object:
    """Return what may be published of a value, or None."""
    if isinstance(value, BaseModel):
        return _of_table(value, key) or None
    if isinstance(value, list | tuple):
        parts = [_of_value(part, annotation, key) for part in value]
        return [part for part in parts if part is not None] or None
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, str):
        return value if value in _choices(annotation) else public_text(key, value)
    return value if isinstance(value, bool | int | float) else None


def _choices(annotation: object) -> frozenset[object]:
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return frozenset(parts)
    return frozenset().union(*map(_choices, parts))


def check_public(toml: str, name: str) -> None:
    """Raise SettingsError if the settings file ``toml``, which a ConfigMap keeps as it is, holds a secret."""
    if keys := list(_secrets(tomllib.loads(toml), "")):
        raise SettingsError(
            f"{name}: expected no secret in the settings of a run on a cluster, whose ConfigMap everybody reads who may "
            f"read the namespace, but {', '.join(keys)} holds a password or key: remove it. Give bus.url by the Secret "
            "that bus.existingSecret names in the chart's values, and the key of an endpoint by key_source"
        )


def _secrets(value: object, key: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _secrets(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for part in value:
            yield from _secrets(part, key)
    elif isinstance(value, str) and (holds_secret(value) or (value and SECRET_NAME.fullmatch(key.rpartition(".")[2]))):
        yield key
