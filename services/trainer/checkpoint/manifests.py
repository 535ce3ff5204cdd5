"""Decode and check the tables of a checkpoint: its state and its files, as ``state.json`` and a stored manifest hold them.

Whoever can write to the run's folder or its object storage chooses these bytes, so names may only lead to files inside
the checkpoint's own folder: one to four parts of letters, digits, ``_``, ``-`` and ``.``, none of which begins with a dot.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shared.bus.messages import PolicyVersion

MOST_BYTES = 16 << 20
"""Largest marker or manifest that is read."""
_NAME = re.compile(r"(?=.{1,255}\Z)[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*){0,3}", re.ASCII)
_MOST = 10**12
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file of a checkpoint as it was written."""

    name: str
    """Relative to the checkpoint's folder."""
    nbytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointState:
    """What a checkpoint knows beside weights and optimizer."""

    step: int
    version: PolicyVersion
    cursor: int
    """Prompts admitted when it was written: where the dataset goes on if the bus is lost."""
    journal_entry: str
    """The last journal entry that the weights contain; empty before the first."""
    ranks: int
    zero_stage: int
    random_state: str = ""
    """Not used; checkpoints of older versions have it."""
    position: int | None = None
    """Place in the dataset of the first prompt that was not trained; None (older checkpoints): ``cursor``."""
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    """How the groups of the run had ended."""
    kl_coefficient: float | None = None
    """What a nat away from the reference costs, where it is steered."""
    adapter_of: str = ""
    """With adapters: the base that they belong to, and their rank and scale; the base itself is not in the checkpoint."""
    settings_revision: int = 0
    live_values: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The revision of the live settings when it was written, and what differs there from the run's file."""


_STATE: TypeAdapter[CheckpointState] = TypeAdapter(CheckpointState)


def parse(data: bytes) -> dict[str, Any]:
    """Return the JSON object in ``data``.

    Raises:
        ValueError: it is none, or too large.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES:,} bytes")
    try:
        raw = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(raw, dict):
        raise ValueError("it is not a JSON object")
    return raw


def decode_state(raw: Mapping[str, Any]) -> CheckpointState:
    """Return the state in ``raw``.

    Raises:
        ValueError: a field is missing, unknown, of another type or out of range.
    """
    try:
        CheckpointState(**raw)  # TypeError for an unknown field, which pydantic would ignore
        state = _STATE.validate_json(json.dumps(raw), strict=True)
    except (TypeError, ValidationError) as error:
        raise ValueError(f"its state is not one of a checkpoint: {error}") from error
    if not (0 <= state.step < _MOST and 0 <= state.version < _MOST):
        raise ValueError(f"its state has an impossible step or version: {state.step} and {state.version}")
    return state


def decode_files(raw: object) -> tuple[CheckpointFile, ...]:
    """Return the table of files in ``raw``.

    Raises:
        ValueError: an entry is malformed, or a name leaves the folder, comes twice, or is a file and a folder.
    """
    if not isinstance(raw, Sequence) or not all(isinstance(entry, Mapping) for entry in raw):
        raise ValueError("its table of files is not a list of entries")
    try:
        files = tuple(CheckpointFile(**entry) for entry in raw)
    except TypeError as error:
        raise ValueError(f"its table of files is malformed: {error}") from error
    for file in files:
        _check(file)
    names = {file.name for file in files}
    if len(names) < len(files):
        raise ValueError("its table of files has a name twice")
    folders = {file.name[:place] for file in files for place, letter in enumerate(file.name) if letter == "/"}
    if both := names & folders:
        raise ValueError(f"its table of files has {min(both)!r} as a file and as a folder")
    return files


def _check(file: CheckpointFile) -> None:
    if not isinstance(file.name, str) or not _NAME.fullmatch(file.name):
        raise ValueError(f"its table of files names {file.name!r}, which is not a file inside a checkpoint's folder")
    if not isinstance(file.nbytes, int) or isinstance(file.nbytes, bool) or file.nbytes < 0:
        raise ValueError(f"its table of files gives {file.name} {file.nbytes!r} bytes")
    if not isinstance(file.sha256, str) or not _SHA256.fullmatch(file.sha256):
        raise ValueError(f"its table of files gives {file.name} no SHA-256")


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of ``content``, whatever the order of its fields."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
