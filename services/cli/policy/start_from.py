"""``penstock up --from RUN[@STEP]``: begin a run with the weights of another run's checkpoint.

::

    checkpoint of RUN ──▶ <run folder>/initial    its weights in Hugging Face form: policy.model of the new run
                     └──▶ <run folder>/start      with --optimizer: the checkpoint, which the trainer loads at step 0
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.services.offline.stored import export
from penstock.services.up import prepare, run_folder
from penstock.services.up.continuation import FIXED, shown, value_of
from penstock.shared.errors import SettingsError
from penstock.shared.files.checkpoint_folder import CHECKPOINTS
from penstock.shared.settings import Settings, load, load_run

if TYPE_CHECKING:
    from penstock.services.trainer.checkpoint.local_store import Checkpoint

INITIAL = "initial"
_OWN = ("run.id", "run.seed", "policy.model", "policy.tokenizer")
"""Settings in which a run may differ from the one whose optimizer it continues."""


def prepared_from(
    config: Path | None, resume: Path | None, flags: Sequence[str], source: str, *, optimizer: bool
) -> prepare.Prepared:
    """Return a new run, ready to start, that begins with the checkpoint ``source``.

    Raises:
        PenstockError: RUN has no such checkpoint, or the settings do not fit its optimizer.
    """
    if config is None or resume is not None or not source:
        raise SettingsError("--from begins a new run, and --optimizer belongs to it: expected CONFIG --from RUN[@STEP]")
    settings = load(config, flags)
    run_id = settings.run.id or run_folder.new_run_id(config)
    folder = settings.run.folder.absolute() / run_id
    checkpoint, of = _checkpoint(source)
    if optimizer:
        _check_optimizer(settings, of, checkpoint)
    if folder.exists():
        raise SettingsError(f"expected a new run with --from, but {folder} exists: change run.id")
    own = [f"--run.id={run_id}", f"--policy.model={folder / INITIAL}", "--policy.tokenizer="]
    try:
        with run_folder.private_files():
            folder.mkdir(mode=0o700, parents=True)
            export(of, int(checkpoint.state.version), folder / INITIAL)
            if optimizer:
                _copy(checkpoint.folder, folder)
        return prepare.prepare(config, None, [*flags, *own])
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise SettingsError(
            f"could not write the initial policy: {error}: free disk space there, or change run.folder"
        ) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _checkpoint(source: str) -> "tuple[Checkpoint, Settings]":
    from penstock.services.trainer.checkpoint import local_store
    from penstock.services.trainer.checkpoint.signatures import open_signer

    name, at, step = source.rpartition("@")
    if not at or not step.isdecimal():
        name, step = source, ""
    settings = load_run(Path(name))
    known = {each.state.step: each for each in local_store.find(settings.run_folder / CHECKPOINTS)}
    chosen = known.get(int(step)) if step else known[max(known)] if known else None
    if chosen is None:
        steps = ", ".join(map(str, sorted(known))) or "no step"
        raise SettingsError(
            f"there is no checkpoint {f'of step {step} ' if step else ''}in {settings.run_folder}: it has those of {steps}; "
            "change --from, or start from an export with --policy.model"
        )
    if reason := local_store.damage(chosen.folder, signer=open_signer(settings)):
        raise SettingsError(f"the checkpoint {chosen.folder} is damaged ({reason}): give another step to --from")
    return chosen, settings


def _check_optimizer(settings: Settings, of: Settings, checkpoint: "Checkpoint") -> None:
    for key in (key for key in FIXED if key not in _OWN):
        ours, theirs = value_of(settings, key), value_of(of, key)
        if ours != theirs:
            raise SettingsError(
                f"expected {key} = {shown(theirs)}, as in {checkpoint.folder}, whose optimizer is continued, found "
                f"{shown(ours)}: change it, or leave --optimizer out"
            )
    if settings.policy.lora.rank:
        raise SettingsError("--optimizer needs a run without adapters: leave it out, or set policy.lora.rank = 0")
    if settings.trainer.signing_key_file is not None:
        raise SettingsError(
            "--optimizer copies a checkpoint without a signature of this run: leave it out, or trainer.signing_key_file"
        )


def _copy(checkpoint: Path, folder: Path) -> None:
    """Link the checkpoint's files, or copy them to another file system."""
    from penstock.services.trainer.checkpoint.local_store import START

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    shutil.copytree(checkpoint, folder / START, copy_function=link)
