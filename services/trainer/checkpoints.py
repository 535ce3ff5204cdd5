"""Checkpoints on disk: written beside, made whole by one rename, newest kept.

::

    <run folder>/checkpoints/step-000020/
        engine/         DeepSpeed: model and optimizer, one file a rank; with adapters, theirs only
        critic/         the same of the critic, where there is one
        state.json      step, version, cursor, last journal entry, ranks, ZeRO stage (written last)

A folder without ``state.json`` is no checkpoint. Ranks and ZeRO stage may not change between save and load;
the message says what to do instead. (Weights alone are read whatever the ranks, see ``export``.)
"""

import dataclasses
import json
import shutil
from collections.abc import Set
from pathlib import Path

from shared import durable
from shared.errors import SettingsError
from shared.messages import Json, PolicyVersion
from shared.settings import PolicySettings

_MARKER = "state.json"


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
    random_state: str
    """Torch's CPU generator, hex."""
    position: int | None = None
    """Place in the dataset of the first prompt that was not trained; None (older checkpoints): ``cursor``."""
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    """How the groups of the run had ended."""
    kl_coefficient: float | None = None
    """What a nat away from the reference costs, where it is steered."""
    adapter_of: str = ""
    """With adapters: the base that they belong to, and their rank and scale; the base itself is not in the checkpoint."""
    settings_revision: int = 0
    live_values: dict[str, Json] = dataclasses.field(default_factory=dict)
    """The revision of the live settings when it was written, and what differs there from the run's file."""


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint."""

    folder: Path
    state: CheckpointState


def beside(root: Path, step: int) -> Path:
    """Return the folder in which the checkpoint of ``step`` is written before it is made whole."""
    return root / f".step-{step:06d}.tmp"


def make_whole(root: Path, state: CheckpointState) -> Checkpoint:
    """Write the marker into :func:`beside`, and rename the folder into place."""
    written = beside(root, state.step)
    (written / _MARKER).write_text(json.dumps(dataclasses.asdict(state), indent=1), encoding="utf-8")
    return rename(written, root, state)


def rename(written: Path, root: Path, state: CheckpointState) -> Checkpoint:
    """Make the folder ``written``, which holds all of a checkpoint, the one of its step under ``root``."""
    folder = root / f"step-{state.step:06d}"
    for path in [*written.rglob("*"), written]:
        durable.flush(path)
    shutil.rmtree(folder, ignore_errors=True)
    written.rename(folder)
    durable.flush(root)
    return Checkpoint(folder, state)


def find(root: Path) -> list[Checkpoint]:
    """Return the whole checkpoints under ``root``, oldest first."""
    found = []
    for folder in sorted(root.glob("step-*")) if root.is_dir() else ():
        if (checkpoint := _read(folder)) is not None:
            found.append(checkpoint)
    return found


def _read(folder: Path) -> Checkpoint | None:
    try:
        raw = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        return Checkpoint(folder, CheckpointState(**raw))
    except (OSError, ValueError, TypeError):
        return None


def newest(root: Path, at_most_step: int | None, revoked: Set[PolicyVersion] = frozenset()) -> Checkpoint | None:
    """Return the newest whole checkpoint of no ``revoked`` version, of a step that the ledger knows where one is given."""
    usable = [found for found in find(root) if found.state.version not in revoked]
    usable = [found for found in usable if at_most_step is None or found.state.step <= at_most_step]
    return usable[-1] if usable else None


def check_ranks(checkpoint: Checkpoint, ranks: int, zero_stage: int) -> None:
    """Raise SettingsError where a checkpoint was written by another number of ranks or ZeRO stage."""
    state = checkpoint.state
    if (state.ranks, state.zero_stage) != (ranks, zero_stage):
        raise SettingsError(
            f"expected to resume {checkpoint.folder} with {state.ranks} ranks (trainer.ranks × trainer.nodes) and trainer.zero_stage = "
            f"{state.zero_stage}, which wrote it, found {ranks} and {zero_stage}: change them back, or start a new run from "
            f"what `penstock export --version {state.version}` writes"
        )


def base_of(policy: PolicySettings) -> str:
    """Return what adapters belong to, in words; "" without any."""
    lora = policy.lora
    return f"{policy.model} (rank {lora.rank}, alpha {lora.alpha:g}, {lora.target_modules})" if lora.rank else ""


def check_base(checkpoint: Checkpoint, policy: PolicySettings) -> None:
    """Raise SettingsError where a checkpoint's adapters are not those of the settings."""
    found, expected = base_of(policy), checkpoint.state.adapter_of
    if found != expected:
        raise SettingsError(
            f"expected to resume {checkpoint.folder} with {expected or 'no adapters'}, which wrote it, found "
            f"{found or 'no adapters'}: change policy.model or policy.lora back"
        )


def superfluous(root: Path, keep_last: int) -> list[Checkpoint]:
    """Return all but the newest ``keep_last`` checkpoints."""
    return find(root)[:-keep_last]


def is_there(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is still whole on disk, and its folder not another's by now."""
    return _read(checkpoint.folder) == checkpoint


def delete(checkpoint: Checkpoint) -> None:
    """Delete a checkpoint: first its marker, so that half of one is none."""
    (checkpoint.folder / _MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint.folder, ignore_errors=True)
