"""Digests of the files that a run was started with: its data, models, tokenizers, chat templates, and functions of
a script or notebook.

::

    <run folder>/inputs.json         {"inputs": {setting: {name: {path, digest, stat}}}, "accepted": [sentence, …]}
    <run folder>/inputs.next.json    the same of a resume, until it is accepted

Files are digested whole. Only weights (safetensors of more than 64 MiB) are digested by size, beginning, end and 62
blocks between them, which takes less than a second per 10 GB: other weights of the same architecture differ there, a
few changed numbers need not. A file whose size, times and inode are as noted is not read again.

The user's other functions are noted on the bus (``penstock.shared.bus.stores.run.functions``).
"""

import dataclasses
import hashlib
import json
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import TypeAdapter

from penstock.shared.dataset_source import hub_dataset
from penstock.shared.errors import SettingsError
from penstock.shared.files.durable import write_whole
from penstock.shared.settings import Settings
from penstock.shared.settings.rewards.models import ModelScorer
from penstock.shared.settings.rewards.scorers import TrlScorer

INPUTS, NEXT_INPUTS = "inputs.json", "inputs.next.json"
ACCEPT = "--accept-changed-inputs"
_OF_MODELS = frozenset((".json", ".jinja", ".txt", ".model", ".py", ".tiktoken", ".vocab", ".bpe", ".safetensors"))
_ABOUT_MODELS = ("LICENSE", "README", "NOTICE", "USE_POLICY")
_WHOLE_BYTES, _END_BYTES, _BLOCK_BYTES, _BLOCKS = 64 << 20, 1 << 20, 64 << 10, 62
_CARRIED = re.compile(r'penstock\.carried:\w+\(file=("[^"\\]*")\)')
"""Functions of a script or notebook, in a file."""
_SETTLED_S = 2.0
"""Age from which on a change of a file shows in its times."""


@dataclasses.dataclass(frozen=True, slots=True)
class InputFile:
    path: str
    digest: str
    stat: tuple[int, ...] = ()
    """Size, times of change (ns) and inode; empty: too new to tell a later change by."""


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    inputs: dict[str, dict[str, InputFile]]
    """By setting and by name, which does not depend on where data and models are."""
    accepted: tuple[str, ...] = ()
    """Changes with which the run was continued."""

    def differences(self, now: "Inputs") -> list[str]:
        """Return the changed files of settings that both have, as ``path (setting)``."""
        changed = []
        for setting in self.inputs.keys() & now.inputs.keys():
            before, after = self.inputs[setting], now.inputs[setting]
            for name in sorted(before.keys() | after.keys()):
                old, new = before.get(name), after.get(name)
                if old is None or new is None or old.digest != new.digest:
                    file = new or old
                    assert file is not None
                    fate = "has changed" if old and new else "is new" if new else "is missing"
                    changed.append(f"{file.path} ({setting}) {fate}")
        return sorted(changed)

    def write(self, file: Path) -> None:
        """Raises OSError."""
        write_whole(file, json.dumps(dataclasses.asdict(self), indent=1))


def read_inputs(run_folder: Path) -> Inputs | None:
    """Return what the run in ``run_folder``, or its resume, was started with; None: not noted, as by an older Penstock."""
    for file in (run_folder / NEXT_INPUTS, run_folder / INPUTS):
        if file.is_file():
            try:
                return _INPUTS.validate_json(file.read_bytes())
            except ValueError as error:
                raise SettingsError(
                    f"expected digests in {file}, found something else: remove it to note them again"
                ) from error
    return None


def settle_inputs(settings: Settings, run_folder: Path, *, accept: bool = False) -> Inputs:
    """Return the digests of the files of ``settings``, with the changes that are accepted.

    Raises:
        SettingsError: a file is not what the run was started with, and that is not accepted.
    """
    known = read_inputs(run_folder) or Inputs({})
    now = Inputs({setting: _digested(files, known.inputs.get(setting, {})) for setting, files in _files(settings)})
    now = Inputs({setting: files for setting, files in now.inputs.items() if files}, known.accepted)
    changed = known.differences(now)
    if changed and not accept:
        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise SettingsError(
            f"expected the files with which the run was started, found that {changed[0]}{more}: what it continues would be mixed with "
            f"something else; put the file back, or accept the change by `penstock up --resume {shlex.quote(str(run_folder))} {ACCEPT}` (without "
            f"`penstock up`: remove {run_folder / INPUTS})"
        )
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return dataclasses.replace(now, accepted=(*known.accepted, *(f"{each}, accepted at {at}" for each in changed)))


def _files(settings: Settings) -> Iterator[tuple[str, Mapping[str, Path | str]]]:
    """Yield each setting with the files it names; a text is digested itself."""
    data = enumerate(settings.data.sources)
    yield "data.path", {name: path for place, source in data for name, path in _of_data(source, str(place))}
    for held_out in settings.evaluation.held_out:
        yield settings.evaluation.setting_of(held_out), dict(_of_data(held_out.path, "0"))
    yield "policy.model", dict(_of_model(settings.policy.model))
    yield "policy.tokenizer", dict(_of_model(settings.policy.tokenizer))
    yield "algorithm.critic.model", dict(_of_model(settings.algorithm.critic.model))
    for scorer in settings.reward.scorers:
        if isinstance(scorer, ModelScorer):
            yield scorer.model_setting, dict(_of_model(scorer.model))
        if isinstance(scorer, TrlScorer):
            files = (_CARRIED.fullmatch(function) for function in scorer.functions)
            yield f"functions of scorer {scorer.name!r}", {file[1]: Path(json.loads(file[1])) for file in files if file}
    for teacher in settings.reward.teachers:
        yield teacher.setting, dict(_of_model(teacher.model))


def _of_data(source: str, name: str) -> Iterator[tuple[str, Path | str]]:
    if hub_dataset(source) is not None:
        yield name, source  # with its commit
        return
    path = Path(source)
    if path.is_file():
        yield name, path
    for file in sorted(path.rglob("*")) if path.is_dir() else ():
        if file.is_file() and not file.name.startswith("."):
            yield f"{name}/{file.relative_to(path)}", file


def _of_model(source: str) -> Iterator[tuple[str, Path | str]]:
    folder = Path(source)
    if not source or not folder.is_dir():  # of a hub's model, the commit is not known before it is loaded
        return
    for file in sorted([*folder.iterdir(), *folder.glob("additional_chat_templates/*")]):
        if file.suffix in _OF_MODELS and not file.name.upper().startswith(_ABOUT_MODELS) and file.is_file():
            yield str(file.relative_to(folder)), file


def _digested(files: Mapping[str, Path | str], known: Mapping[str, InputFile]) -> dict[str, InputFile]:
    digested = {}
    for name, file in files.items():
        if isinstance(file, str):
            digested[name] = InputFile(file, file)
            continue
        try:
            digested[name] = _file(file, known.get(name))
        except OSError as error:
            raise SettingsError(f"could not read {file} ({error.strerror or error}): make it readable") from error
    return digested


def _file(path: Path, known: InputFile | None) -> InputFile:
    status, now_s = path.stat(), time.time()
    stat = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    is_settled = now_s - max(status.st_mtime, status.st_ctime) > _SETTLED_S
    if known is not None and known.stat == stat:
        return dataclasses.replace(known, path=str(path))
    in_parts = status.st_size > _WHOLE_BYTES and path.suffix == ".safetensors"
    digest = _digest_parts(path, status.st_size) if in_parts else _digest(path)
    return InputFile(str(path), digest, stat if is_settled else ())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _digest_parts(path: Path, size: int) -> str:
    """Digest beginning, end and blocks between them, at places that depend on the size only."""
    digest = hashlib.sha256(str(size).encode())
    between = [(place * size // (_BLOCKS + 1), _BLOCK_BYTES) for place in range(1, _BLOCKS + 1)]
    with path.open("rb", buffering=0) as file:
        for start, count in [(0, _END_BYTES), *between, (size - _END_BYTES, _END_BYTES)]:
            file.seek(start)
            digest.update(file.read(count))
    return f"parts:{digest.hexdigest()}"


_INPUTS = TypeAdapter(Inputs)
