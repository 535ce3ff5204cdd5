"""Whether a run can be continued, and with which settings."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from penstock.services.up.run_folder import has_checkpoint
from penstock.shared.errors import PenstockError, SettingsError
from penstock.shared.settings import Settings
from penstock.shared.settings.section import Section

FIXED = (
    "run.id",
    "run.seed",
    "policy.model",
    "policy.tokenizer",
    "policy.dtype",
    "policy.lora",
    "algorithm.advantage",
    "algorithm.critic.model",
    "trainer.optimizer",
    "trainer.offload",
    "trainer.deepspeed",
)
"""Settings and tables that require a new run."""


def check_unchanged(before: Settings, after: Settings, sources: Mapping[str, str]) -> None:
    """Raise SettingsError if a setting of ``FIXED`` changed."""
    for key in FIXED:
        old, new = value_of(before, key), value_of(after, key)
        if old != new:
            source = next((source for name, source in sources.items() if f"{name}.".startswith(f"{key}.")), "")
            raise SettingsError(
                f"expected {key} = {shown(old)}, with which the run was started, found {shown(new)}"
                f"{f' ({source})' if source else ''}: leave it out, or start a new run, which may begin with what `penstock export` writes"
            )


class RunEnded(PenstockError):
    def __init__(self, sentence: str, folder: Path) -> None:
        super().__init__(sentence)
        self.folder = folder


def check_steps_left(folder: Path, steps: int) -> None:
    """Raise RunEnded if the run was stopped for good, or has finished ``steps`` steps, and nothing is left to be written."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        state, made, why = str(summary["state"]), int(summary["steps"]), str(summary["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if not (folder / "report.html").exists():
        return
    quoted = shlex.quote(str(folder))
    if state == "stopped" and has_checkpoint(folder, made):  # else its trainer has yet to write it
        start = f"start another run (penstock up CONFIG{f' --from {quoted}' if made else ''})"
        how = f"to train on from its newest checkpoint, {start}; `penstock export {quoted}` writes its policy"
        raise RunEnded(f"the run was stopped for good after {made} steps ({why}): {how if made else start}", folder)
    if state == "finished" and made >= steps:
        how = f"to extend it, give a larger number, such as --run.steps {2 * made}"
        raise RunEnded(f"the run has finished its {made} steps: {how}", folder)


def value_of(settings: Settings, key: str) -> object:
    value: object = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value


def shown(value: object) -> str:
    """Return a setting's value for messages."""
    return str(value.model_dump(exclude_defaults=True)) if isinstance(value, Section) else repr(value)
