"""Checkpoints on disk, completed by one rename.

::

    <run folder>/checkpoints/step-000020/
        engine/         DeepSpeed: model and optimizer, one file a rank; with adapters, theirs only
        critic/         the same of the critic, if any
        state.json      step, version, cursor, last journal entry, ranks, ZeRO stage; size and digest of every file
                        (written last)

A folder without ``state.json`` is no checkpoint. :func:`damage` verifies digests, signature and pickles before loading.
Other ranks, or those of another ZeRO stage, read it by ranges (``model/saving/ranges``).
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.services.trainer.checkpoint import manifests, pickles
from penstock.services.trainer.checkpoint.manifests import (
    CheckpointFile,
    CheckpointState,
    decode_files,
    decode_state,
    digest_of,
)
from penstock.services.trainer.checkpoint.signatures import FIELD, UNSIGNED, Signer
from penstock.shared.errors import SettingsError
from penstock.shared.files import durable
from penstock.shared.files.checkpoint_folder import name_of
from penstock.shared.settings import PolicySettings

MARKER = "state.json"
START = "start"
"""Folder in the run's: another run's checkpoint, with which this one begins at step 0."""
_DIGEST = "sha256"
"""SHA-256 of the marker's other fields, except the signature."""
_MOST_READERS, _READ_BYTES = 8, 1 << 20
_EXPERTS = re.compile(r"/experts_\d+_model_states\.pt$")
DAMAGED = "damaged-"
"""Of the names of folders that are set aside."""


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    state: CheckpointState
    files: tuple[CheckpointFile, ...] = ()
    """All but ``state.json``."""


def beside(root: Path, step: int) -> Path:
    return root / f".{name_of(step)}.tmp"


def make_whole(
    root: Path,
    state: CheckpointState,
    written: Mapping[Path, CheckpointFile] | None = None,
    signer: Signer = UNSIGNED,
) -> Checkpoint:
    """Write the marker into :func:`beside`, and rename the folder into place. ``written``: files with known digests,
    by path. Raises OSError: storage refused it.
    """
    folder, known = beside(root, state.step), written or {}
    files = tuple(
        dataclasses.replace(known.get(path) or digest(path), name=path.relative_to(folder).as_posix())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MARKER
    )
    content = {**dataclasses.asdict(state), "files": [dataclasses.asdict(file) for file in files]}
    text = json.dumps(signer.signed({**content, _DIGEST: digest_of(content)}), indent=1)
    (folder / MARKER).write_text(text, encoding="utf-8")
    return rename(folder, root, state, files)


def rename(written: Path, root: Path, state: CheckpointState, files: tuple[CheckpointFile, ...]) -> Checkpoint:
    """Move the complete folder ``written`` to its place under ``root``."""
    folder = root / name_of(state.step)
    for path in [*written.rglob("*"), written]:
        durable.flush(path)
    durable.replace_folder(written, folder)
    return Checkpoint(folder, state, files)


def clear_unfinished(root: Path) -> None:
    for folder in root.glob(".step-*.tmp"):
        shutil.rmtree(folder, ignore_errors=True)


def digest(path: Path, part_bytes: int = manifests.PART_BYTES) -> CheckpointFile:
    """Return name, size and digest of a file, whose parts several threads read."""
    with path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        places = range(0, nbytes, part_bytes)
        of_part = functools.partial(_digest_of_part, file.fileno(), part_bytes)
        with concurrent.futures.ThreadPoolExecutor(min(_MOST_READERS, len(places) or 1)) as readers:
            whole = hashlib.sha256(b"".join(readers.map(of_part, places)))
    return CheckpointFile(path.name, nbytes, whole.hexdigest(), part_bytes)


def _digest_of_part(descriptor: int, nbytes: int, place: int) -> bytes:
    sha256, end = hashlib.sha256(), place + nbytes
    while place < end and (data := os.pread(descriptor, min(_READ_BYTES, end - place), place)):
        sha256.update(data)
        place += len(data)
    return sha256.digest()


def is_intact(path: Path, file: CheckpointFile) -> bool:
    """Whether the content at ``path`` is that of ``file``. Raises OSError: it cannot be read."""
    return digest(path, file.part_bytes).sha256 == file.sha256


def find(root: Path) -> list[Checkpoint]:
    """Return the complete checkpoints under ``root``, oldest first, unverified."""
    checkpoints = []
    for folder in sorted(root.glob("step-*")) if root.is_dir() else ():
        if (checkpoint := read(folder)) is not None:
            checkpoints.append(checkpoint)
    return checkpoints


def newest(root: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint under ``root``, unverified; older ones are not read."""
    return next(
        (checkpoint for folder in sorted(root.glob("step-*"), reverse=True) if (checkpoint := read(folder))), None
    )


def read(folder: Path) -> Checkpoint | None:
    """None if the marker is missing or damaged."""
    raw = _marker(folder)
    return None if raw is None else _decode(folder, raw)


def _marker(folder: Path) -> dict[str, Any] | None:
    try:
        with (folder / MARKER).open("rb") as file:
            return manifests.parse(file.read(manifests.MOST_BYTES + 1))
    except (OSError, ValueError):
        return None


def _decode(folder: Path, marker: Mapping[str, Any]) -> Checkpoint | None:
    raw = {name: value for name, value in marker.items() if name not in (_DIGEST, FIELD)}
    try:
        if marker.get(_DIGEST) != digest_of(raw):
            return None
        files = decode_files(raw.pop("files", None))
        return Checkpoint(folder, decode_state(raw), files)
    except ValueError:
        return None


def damage(folder: Path, ending: str = "", signer: Signer = UNSIGNED) -> str:
    """Verify all files, or those ending with ``ending``; return why the checkpoint cannot be loaded, or ""."""
    if not folder.is_dir():
        return "the folder is missing"
    if not (folder / MARKER).is_file():
        return f"{MARKER} is missing"
    marker = _marker(folder)
    if marker is None or (checkpoint := _decode(folder, marker)) is None:
        return f"{MARKER} has changed"
    if reason := signer.refusal(marker):
        return reason
    if unknown := _unknown_pickle(checkpoint):
        return f"{unknown} is not one of the files that were written"
    files = [file for file in checkpoint.files if file.name.endswith(ending)]
    largest_first = sorted(files, key=lambda file: -file.nbytes)
    with concurrent.futures.ThreadPoolExecutor(min(_MOST_READERS, os.cpu_count() or 1)) as readers:
        return next(filter(None, readers.map(functools.partial(_damage_of, folder), largest_first)), "")


def _unknown_pickle(checkpoint: Checkpoint) -> str:
    names = {path.relative_to(checkpoint.folder).as_posix() for path in checkpoint.folder.rglob(f"*{pickles.SUFFIX}")}
    return min(names - {file.name for file in checkpoint.files}, default="")


def _damage_of(folder: Path, file: CheckpointFile) -> str:
    path = folder / file.name
    try:
        if path.resolve() != folder.resolve() / file.name or not stat.S_ISREG(path.lstat().st_mode):
            return f"{file.name} is a link or no regular file"
        if (nbytes := path.stat().st_size) != file.nbytes:
            return f"{file.name} has {nbytes:,} bytes instead of {file.nbytes:,}"
        if not is_intact(path, file):
            return f"the content of {file.name} has changed"
        return pickles.refusal(path) if file.name.endswith(pickles.SUFFIX) else ""
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"


def step_of(folder: Path) -> int | None:
    prefix, _, number = folder.name.partition("-")
    return int(number) if prefix == "step" and number.isdecimal() else None


def set_aside(folder: Path) -> Path:
    aside = folder.with_name(f"{DAMAGED}{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def base_of(policy: PolicySettings) -> str:
    lora = policy.lora
    return f"{policy.model} (rank {lora.rank}, alpha {lora.alpha:g}, {lora.target_modules})" if lora.rank else ""


def check_readable(checkpoint: Checkpoint, policy: PolicySettings) -> None:
    """Raise SettingsError for a checkpoint of other adapters, or of divided experts in files of their own."""
    if any(_EXPERTS.search(file.name) for file in checkpoint.files):
        raise SettingsError(
            f"the checkpoint in {checkpoint.folder} has experts in files of their own, as an unreleased Penstock wrote them: use that "
            "version, or start a run from what its `penstock export` writes"
        )
    base, expected = base_of(policy), checkpoint.state.adapter_of
    if base != expected:
        raise SettingsError(
            f"expected to resume {checkpoint.folder} with {expected or 'no adapters'}, which wrote it, found "
            f"{base or 'no adapters'}: change policy.model or policy.lora back"
        )


def superfluous(root: Path, keep_last: int) -> list[Checkpoint]:
    return find(root)[:-keep_last]


def is_there(checkpoint: Checkpoint) -> bool:
    return read(checkpoint.folder) == checkpoint


def delete(checkpoint: Checkpoint) -> None:
    (checkpoint.folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint.folder, ignore_errors=True)
