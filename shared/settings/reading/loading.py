"""Load settings from a TOML file, the environment and flags; each error names the source of the wrong value."""

import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli_w
from pydantic import ValidationError

from penstock.shared.errors import SettingsError
from penstock.shared.files.durable import write_whole
from penstock.shared.settings.reading.explanations import Problem, explanation, located, meant
from penstock.shared.settings.reading.replaced import REPLACED, drop_defaults
from penstock.shared.settings.root import Settings
from penstock.shared.text.redaction import SECRET_NAME, redact

ENVIRONMENT_PREFIX = "PENSTOCK__"
SETTINGS_FILE = "settings.toml"
"""Where ``penstock up`` writes a run's settings, in its folder."""
_DEEPEST = 32


def load(path: Path | None, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Settings:
    """Without a path: the defaults, overridden in the same way.

    Paths in the file are relative to the working directory.
    """
    environment = os.environ if environment is None else environment
    return loads("" if path is None else _read(path), str(path or "settings"), flags, environment)


def load_run(run: Path) -> Settings:
    """Return the settings of the run in folder ``run``, which may have moved, or those in the TOML file ``run``."""
    if run.is_file():
        return load(run)
    folder = run.resolve()
    if not (folder / SETTINGS_FILE).is_file():
        raise SettingsError(f"no run's folder or settings file at {run}: change RUN")
    settings = load(folder / SETTINGS_FILE, environment={})
    return settings.model_copy(
        update={"run": settings.run.model_copy(update={"folder": folder.parent, "id": folder.name})}
    )


def loads(toml: str, name: str, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Settings:
    return _validated(_values(toml, name, flags, environment or {}), name, sources(flags, environment))


def is_given(key: str, path: Path | None, flags: Sequence[str] = ()) -> bool:
    """Return whether the file, the environment or a flag sets ``key`` to another value than false, 0 or an empty one."""
    value: object = given_tables(path, flags)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return bool(value)


def given_tables(path: Path | None, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the file, the environment and flags set, without what follows from it."""
    return _values("" if path is None else _read(path), str(path or "settings"), flags, os.environ)


def _values(toml: str, name: str, flags: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    try:
        values = tomllib.loads(toml)
    except (ValueError, RecursionError) as error:  # ValueError: an integer of thousands of digits
        raise SettingsError(f"{name} is not TOML: {error}") from error
    drop_defaults(values)
    for key, text in (_environment(environment) | _flags(flags)).items():
        _set(values, key, text)
    return values


def sources(flags: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Raises SettingsError: a flag is no setting."""
    origins = {
        _key(name): f"environment variable {name}" for name in environment or {} if name.startswith(ENVIRONMENT_PREFIX)
    }
    return origins | {key: f"flag --{key}" for key in _flags(flags)}


def given(flags: Sequence[str]) -> dict[str, str]:
    return _flags(flags)


def override(settings: Settings, changes: Mapping[str, object]) -> Settings:
    """Raises SettingsError: a value is wrong, or contradicts the other settings."""
    values = settings.model_dump(mode="json", exclude_none=True)
    for key, value in changes.items():
        table, name = key.split(".")
        values[table][name] = value
    return _validated(values, "settings")


def _validated(values: dict[str, Any], name: str, sources: Mapping[str, str] = MappingProxyType({})) -> Settings:
    if "namespace" in values:
        raise SettingsError(
            f"{name} says where runs are deployed: give a run's settings here, and this file to `penstock deploy RUN.toml --on`"
        )
    _check_values(values, "", name)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError(_explain(error, name, sources)) from error


def _check_values(value: object, key: str, name: str, depth: int = 0) -> None:
    """Raise SettingsError for an integer of more than 64 bits, which TOML has not, a number that is not finite, a secret,
    and tables or lists nested more deeply than every reader can follow."""
    if depth > _DEEPEST:
        shown = key if len(key) <= 60 else f"{key[:60]}…"
        raise SettingsError(f"{name}: expected at most {_DEEPEST} levels of tables and lists, found more in {shown}")
    if isinstance(value, Mapping):
        for inner, part in value.items():
            _check_values(part, f"{key}.{inner}" if key else str(inner), name, depth + 1)
    elif isinstance(value, list | tuple):
        for part in value:
            _check_values(part, key, name, depth + 1)
    elif isinstance(value, int) and value.bit_length() > 63:
        raise SettingsError(
            f"{name}: expected an integer of at most 64 bits in {key}, found a larger one: change {key}"
        )
    elif isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{name}: expected a finite number in {key}, found {value}: change {key}")
    elif isinstance(value, str) and value and SECRET_NAME.fullmatch(key.rpartition(".")[2]) and key not in REPLACED:
        raise SettingsError(
            f"{name}: expected no secret among the settings, which are written to files, but {key} is a secret: "
            f"remove it, and give it by the "
            "environment variable, or the file, that its program reads"
        )


def dump(settings: Settings, path: Path) -> None:
    """Without the password of bus.url; atomic."""
    write_whole(path, dumps(settings))


def dumps(settings: Settings) -> str:
    values = settings.model_dump(mode="json", exclude_none=True)
    values["bus"]["url"] = redact(settings.bus.url)
    return f"# The resolved settings of run {settings.run.id}.\n{tomli_w.dumps(values)}"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of tables by dotted keys.

    >>> flat({"run": {"id": "a", "steps": 3}, "tools": {}})
    {'run.id': 'a', 'run.steps': 3, 'tools': {}}
    """
    keys: dict[str, Any] = {}
    for name, value in values.items():
        keys |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return keys


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # editors on Windows write a mark in front
    except FileNotFoundError as error:
        raise SettingsError(f"no settings file at {path}: check the path after the command") from error
    except IsADirectoryError as error:
        raise SettingsError(f"expected a settings file, found the folder {path}: give its TOML file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"could not read the settings file at {path}: {error}") from error


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {_key(name): value for name, value in environment.items() if name.startswith(ENVIRONMENT_PREFIX)}


def _key(variable: str) -> str:
    return variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")


def _flags(flags: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    words = iter(flags)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            hint = f"; {known}" if (known := meant(name)) else ""
            raise SettingsError(f"expected a setting such as --trainer.ranks 2, found {word!r}{hint}")
        given = value if equals else next(words, None)
        if given is None:
            raise SettingsError(f"expected a value after {word}")
        values[name.replace("-", "_")] = given
    return values


def _set(values: dict[str, Any], key: str, text: str) -> None:
    *tables, name = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise SettingsError(f"expected the name of a setting, found {key!r}")
    values[name] = _value(text)


def _value(text: str) -> Any:
    """Read ``text`` as a TOML value, else as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text


def _explain(error: ValidationError, name: str, sources: Mapping[str, str]) -> str:
    problems = [located(dict(problem)) for problem in error.errors()]
    return "\n".join(_with_source(same, name, sources) for same in _by_key(problems))


def _by_key(problems: Sequence[Problem]) -> list[list[Problem]]:
    """Group the problems of each setting; one of a list or table that has wrong parts follows from them."""
    by_key: dict[str, list[Problem]] = {}
    for problem in problems:
        has_wrong_parts = any(other.key.startswith(f"{problem.key}.") for other in problems)
        if not (has_wrong_parts and problem.is_of_form):
            by_key.setdefault(problem.key, []).append(problem)
    return list(by_key.values())


def _with_source(problems: Sequence[Problem], name: str, sources: Mapping[str, str]) -> str:
    key, sentence = problems[0].key, explanation(problems)
    if problems[0].type != "value_error":
        return f"{next((source for known, source in sources.items() if _holds(known, key)), name)}: {sentence}"
    overridden = [f"{known} is set by {source}" for known, source in sources.items() if known in sentence]
    return f"{name}: {sentence}" + (f" ({', '.join(overridden)})" if overridden else "")


def _holds(table: str, key: str) -> bool:
    """Whether ``key`` is the setting ``table``, one of its parts, or a table around it."""
    return f"{key}.".startswith(f"{table}.") or f"{table}.".startswith(f"{key}.")
