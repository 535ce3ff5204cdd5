"""``penstock new``: write a run's TOML file from flags, with the common settings beside them as comments; with an
environment, its code, test and rows, too.
"""

import json
import shlex
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from penstock.services.cli.settings_help import COMMON, entries
from penstock.services.up.display import console
from penstock.shared.errors import SettingsError
from penstock.shared.settings import given, loads

_COMMENT_COLUMN = 48
_EXAMPLES = {"evaluation.path": '"heldout.jsonl"'}
"""Of settings without a default."""


_ENVIRONMENT = Path(__file__).parent / "template" / "environment.py"
_TINY = Path(__file__).resolve().parents[2] / "examples" / "calculator" / "policy"
"""In a checkout: a policy that knows the calculator's episodes."""
_ON_TINY = {
    "policy.model": str(_TINY), "policy.dtype": "float32", "run.device": "cpu", "run.threads": "1", "run.steps": "20",
    "sampling.max_new_tokens": "12", "trainer.learning_rate": "1e-3",
}  # fmt: skip
_EPISODES = {
    "episodes.environment": "environment:Calculator", "episodes.max_turns": "4", "data.path": "train.jsonl",
    "bus.url": "embedded", "algorithm.on_stale": "mask", "reward.expression": "answer * cost",
    "reward.scorers": '[{kind = "answer", name = "answer"}, {kind = "environment", name = "cost"}]',
}  # fmt: skip
_TEST = '''"""Tests of the environment: `python -m pytest`."""

from environment import Calculator


def test_a_call_is_answered_and_costs_a_tenth() -> None:
    environment = Calculator()
    environment.reset()
    assert environment.calculator("37*48") == "1776"
    assert environment.calculator("two") == "?"
    assert environment.get_reward() == 0.8
    environment.reset()
    assert environment.get_reward() == 1.0
'''


def make(path: Path | None, flags: Sequence[str], *, environment: bool) -> None:
    """Write a run, or an environment's folder, and say what is next. Raises SettingsError."""
    if path is None:
        raise SettingsError(
            "the name of the new file is missing: penstock new my-run.toml --policy.model models/my-model"
        )
    shown, before, values = shlex.quote(str(path)), "", given(flags)
    if environment:
        _write_environment(path, values)
        shown, before = "run.toml", f"`cd {shown}`, "
    else:
        _write(path, _checked(path, values))
        if lacking := [key for key in ("policy.model", "data.path") if key not in values]:
            before = f"set {' and '.join(lacking)} in it, "
    console.say(f"{path}: next, {before}`penstock data check {shown}` and `penstock up {shown}`")


def _write_environment(folder: Path, values: Mapping[str, str]) -> None:
    """Write an environment to start from: its class, a test, rows, and the TOML file of a run."""
    if "policy.model" not in values and not _TINY.is_dir():
        raise SettingsError("the model is missing: penstock new FOLDER --environment --policy.model OWNER/NAME")
    text = _checked(folder / "run.toml", {**({} if "policy.model" in values else _ON_TINY), **_EPISODES, **values})
    pairs = [(left, sign, right) for left in range(10, 100, 3) for sign in "*+" for right in range(10, 100, 7)]
    rows = [
        {"prompt": f"{left}{sign}{right}=", "answer": str(left * right if sign == "*" else left + right)}
        for left, sign, right in pairs
    ]
    try:
        folder.mkdir()
        shutil.copyfile(_ENVIRONMENT, folder / "environment.py")
    except OSError as error:
        raise SettingsError(f"expected a new folder, found {folder} ({error.strerror}): give another name") from error
    _write(folder / "test_environment.py", _TEST)
    _write(folder / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    _write(folder / "run.toml", text)


def _checked(path: Path, values: Mapping[str, str]) -> str:
    text = toml(values)
    loads(text, str(path))
    return text


def _write(path: Path, text: str) -> None:
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
