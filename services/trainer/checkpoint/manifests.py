"""Decode and check a checkpoint's state and file table.

The bytes are untrusted: names stay inside the checkpoint's folder (one to four parts of letters, digits, ``_``, ``-``
and ``.``, without leading dots).
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from penstock.shared.bus.messages import PolicyVersion

MOST_BYTES = 16 << 20
_NAME = re.compile(r"(?=.{1,255}\Z)[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*){0,3}", re.ASCII)
_MOST = 10**12
_SHA256 = re.compile(r"[0-9a-f]{64}")
PART_BYTES = 64 << 20
"""Of a file, digested beside its other parts."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointFile:
    name: str
    """Relative to the checkpoint's folder."""
    nbytes: int
    sha256: str
    """Of the SHA-256 digests of its parts, one after the other."""
    part_bytes: int = PART_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointState:
    step: int
    version: PolicyVersion
    cursor: int
    """Prompts admitted; the dataset continues here if the bus is lost."""
    journal_entry: str
    """Last one in the weights; "" before the first."""
    ranks: int
    zero_stage: int
    random_state: str = ""
    """Unused."""
    position: int | None = None
    """First untrained prompt in the dataset; None: ``cursor``."""
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    kl_coefficient: float | None = None
    """Unused."""
    adapter_of: str = ""
    """The adapters' base, rank and scale."""
    settings_revision: int = 0
    live_values: dict[str, Any] = dataclasses.field(default_factory=dict)
    signals: dict[str, str] = dataclasses.field(default_factory=dict)
    """Of problems, with ``data.curriculum``."""
    functions: dict[str, str] = dataclasses.field(default_factory=dict)
    """SHA-256 of the source file of each function of the user's own."""
    gpu_s: float = 0.0
    """GPU-seconds until ``gpu_until_s`` (Unix time)."""
    gpu_until_s: float = 0.0
    pins: list[PolicyVersion] = dataclasses.field(default_factory=list)
    """Versions whose checkpoints are kept."""
    released: list[PolicyVersion] = dataclasses.field(default_factory=list)
    """Versions that people may use."""
    expert_parallel: int = 1


_STATE: TypeAdapter[CheckpointState] = TypeAdapter(CheckpointState)


def parse(data: bytes) -> dict[str, Any]:
    """Return the JSON object in ``data``; ValueError if it is something else, or too large."""
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
    """Raises ValueError for missing, unknown or invalid fields."""
    try:
        CheckpointState(**raw)  # TypeError for unknown fields, which pydantic would ignore
        state = _STATE.validate_json(json.dumps(raw), strict=True)
    except (TypeError, ValidationError) as error:
        raise ValueError(f"its state is not one of a checkpoint: {error}") from error
    if not (0 <= state.step < _MOST and 0 <= state.version < _MOST):
        raise ValueError(f"its state has an impossible step or version: {state.step} and {state.version}")
    if not (0 <= state.gpu_s < _MOST and 0 <= state.gpu_until_s < _MOST):
        raise ValueError(f"its state has impossible GPU-seconds: {state.gpu_s} until {state.gpu_until_s}")
    return state


def decode_files(raw: object) -> tuple[CheckpointFile, ...]:
    """Raises ValueError: an entry or name is malformed, repeated, or both file and folder."""
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
    if file.part_bytes != PART_BYTES:
        raise ValueError(f"its table of files gives {file.name} parts of {file.part_bytes!r} bytes")


def digest_of(content: Mapping[str, Any]) -> str:
    """Independent of field order."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
