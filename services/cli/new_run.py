"""``penstock new``: write a run's TOML file from flags, with the common settings beside them as comments."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from penstock.services.cli.settings_help import COMMON, entries
from penstock.shared.errors import SettingsError
from penstock.shared.settings import given, loads

_COMMENT_COLUMN = 48
_EXAMPLES = {"evaluation.path": '"heldout.jsonl"'}
"""Of settings without a default."""


def write(path: Path, flags: Sequence[str]) -> None:
    text = toml(given(flags))
    loads(text, str(path))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SettingsError(f"expected a new file, found {path} ({error.strerror}): give another name") from error


def toml(values: Mapping[str, str]) -> str:
    known = {entry.key: entry for entry in entries() if entry.kind}
    tables = list(dict.fromkeys(key.partition(".")[0] for key in (*known, *values)))
    keys = sorted(dict.fromkeys((*COMMON, *values)), key=lambda key: tables.index(key.partition(".")[0]))
    lines = [
        "# A run: penstock up FILE. Lines that begin with # are defaults; `penstock settings` explains them.",
        "# `penstock data check FILE` shows the data.",
    ]
    for table, group in groupby(keys, lambda key: key.partition(".")[0]):
        lines += ["", f"[{table}]"]
        for key in group:
            entry, name = known.get(key), key.partition(".")[2]
            value = values.get(key)
            default = _EXAMPLES.get(key, entry.default) if entry else ""
            shown = f"# {name} = {default}" if value is None and entry else f"{name} = {_literal(value or '')}"
            unset = "; not set by default" if value is None and key in _EXAMPLES else ""
            lines.append(f"{shown:<{_COMMENT_COLUMN}}  # {entry.brief}{unset}" if entry else shown)
    return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    try:
        tomllib.loads(f"value = {text}")
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    return text
