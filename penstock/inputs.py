"""Objects of a script or notebook as files of a run: a model, its tokenizer, rows and reward functions.

::

    model, tokenizer ──▶ inputs/policy         save_pretrained
    data, held_out   ──▶ inputs/train, heldout save_to_disk, or JSON lines
    rewards          ──▶ inputs/rewards.pkl    cloudpickle ──▶ penstock.carried, in a scorer's processes
"""

import dataclasses
import itertools
import json
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from penstock.shared.errors import SettingsError
from penstock.shared.extras import advice_on

FOLDER = "inputs"
_MOST_BYTES = 64 << 20
Reward: TypeAlias = Callable[..., Any]
Rows: TypeAlias = Any
"""``datasets.Dataset``, or an iterable of dictionaries."""


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Checked objects. Rows and functions are those of the time of the check; the model is saved at the start."""

    model: Any
    tokenizer: Any
    rows: Mapping[str, Rows | str]
    """By name, `train` and `heldout`: a dataset, or JSON lines."""
    names: tuple[str, ...]
    functions: bytes

    @classmethod
    def of(cls, model: Any, tokenizer: Any, data: Rows, held_out: Rows, rewards: Reward | Iterable[Reward]) -> "Inputs":
        """Raises SettingsError: one of them cannot be written to a file."""
        for name, part in (("model", model), ("tokenizer", tokenizer)):
            if part is not None and not hasattr(part, "save_pretrained"):
                raise SettingsError(f"expected a {name} of transformers, found {type(part).__name__}: change {name}")
        if hasattr(model, "peft_config"):
            raise SettingsError("expected a model without adapters, found a PEFT model: merge them, or set policy.lora")
        given = {"train": data, "heldout": held_out}
        rows = {name: _writable(name, part) for name, part in given.items() if part is not None}
        functions = _named([rewards] if callable(rewards) else list(rewards))
        return cls(model, tokenizer, rows, tuple(functions), _pickled(functions) if functions else b"")

    def settings(self, folder: Path) -> dict[str, Any]:
        """Return the settings that name the files in ``folder``."""
        places = {name: str(self._place(name, folder)) for name in self.rows}
        named = {
            "policy.model": None if self.model is None else str(folder / "policy"),
            "policy.tokenizer": None if self.tokenizer is None else str(folder / "tokenizer"),
            "data.path": places.get("train"),
            "evaluation.path": places.get("heldout"),
        }
        if self.names:
            file = json.dumps(str(folder / "rewards.pkl"))
            functions = [f"penstock.carried:{name}(file={file})" for name in self.names]
            named["reward.scorers"] = [{"kind": "trl", "name": "rewards", "functions": functions}]  # type: ignore[assignment]
        return {key: value for key, value in named.items() if value is not None}

    def write(self, folder: Path) -> None:
        """Write the files. Raises SettingsError: the model cannot be saved."""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for name, part in (("policy", self.model), ("tokenizer", self.tokenizer)):
                if part is not None:
                    part.save_pretrained(str(folder / name))
            for name, part in self.rows.items():
                place = self._place(name, folder)
                if isinstance(part, str):
                    place.write_text(part, encoding="utf-8")
                else:
                    part.save_to_disk(str(place))
            if self.names:
                (folder / "rewards.pkl").write_bytes(self.functions)
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            raise SettingsError(f"could not save the run's inputs in {folder}: {error}") from error

    def _place(self, name: str, folder: Path) -> Path:
        return folder / (f"{name}.jsonl" if isinstance(self.rows[name], str) else name)


def _writable(name: str, rows: Rows) -> Rows | str:
    if isinstance(rows, Mapping):
        raise SettingsError(f"expected rows as {name}, found a table of {', '.join(map(str, rows))}: give one of them")
    if hasattr(rows, "save_to_disk"):
        return rows
    lines = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise SettingsError(f"expected dictionaries as rows, found {type(row).__name__} at {name} row {number}")
        try:
            lines.append(json.dumps(dict(row), allow_nan=False, ensure_ascii=False) + "\n")
        except (TypeError, ValueError) as error:
            raise SettingsError(f"expected a row that JSON can hold at {name} row {number}: {error}") from error
    return "".join(lines)


def _named(functions: Iterable[Reward]) -> dict[str, Reward]:
    """Return functions by name; a lambda is `reward`, and equal names are numbered."""
    named: dict[str, Reward] = {}
    for function in functions:
        if not callable(function):
            raise SettingsError(f"expected functions as rewards, found {type(function).__name__}: change rewards")
        own = str(getattr(function, "__name__", type(function).__name__))
        plain = own if own.isidentifier() and not own.startswith("__") else "reward"
        numbered = (f"{plain}_{number}" if number > 1 else plain for number in itertools.count(1))
        named[next(name for name in numbered if name not in named)] = function
    return named


def _pickled(functions: Mapping[str, Reward]) -> bytes:
    try:
        import cloudpickle
    except ImportError as error:
        raise SettingsError(f"reward functions need the package cloudpickle: {advice_on(error)}") from error
    for name, function in functions.items():
        try:
            size = len(cloudpickle.dumps(function))
        except (
            pickle.PicklingError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
            NotImplementedError,
        ) as error:
            raise SettingsError(
                f"the reward function {name!r} cannot be sent to another process, because of what it refers to: {error}: "
                "create that within the function, or move it into a module and name it in [[reward.scorers]]"
            ) from error
        if size > _MOST_BYTES:
            raise SettingsError(
                f"expected a reward function of at most {_MOST_BYTES >> 20} MiB with what it refers to, found {size >> 20} of "
                f"{name!r}: load the data within the function"
            )
    return bytes(cloudpickle.dumps(dict(functions)))


def loader(name: str) -> Callable[[str], Reward]:
    """Return what loads the function ``name`` from a file; one that others may have written is not read: it is code."""

    def load(file: str) -> Reward:
        path = Path(file)
        with path.open("rb") as opened:
            for place, status in ((path, os.fstat(opened.fileno())), (path.parent, path.parent.stat())):
                if status.st_uid != os.getuid() or status.st_mode & 0o022:
                    raise SettingsError(
                        f"expected reward functions that only this user can write, found {place} of another owner, or writable "
                        "by others: change its owner or mode"
                    )
            functions: dict[str, Reward] = pickle.load(opened)  # noqa: S301 (only this user can have written it)
        return functions[name]

    return load
