"""What a run leaves: whether a run that ended in order has its policy, its checkpoint and all records in its trackers."""

import json
import shlex
from pathlib import Path
from typing import Any

from penstock.services.up.prepare import Prepared
from penstock.services.up.run_folder import has_checkpoint
from penstock.services.up.supervisor import Ending
from penstock.shared.errors import PenstockError
from penstock.shared.files.checkpoint_folder import CHECKPOINTS, name_of
from penstock.shared.files.durable import read_object, write_whole
from penstock.shared.settings import SETTINGS_FILE, Settings, load
from penstock.shared.tracked import read_undelivered

_INCOMPLETE = 1


def judge(run: Prepared, ending: Ending) -> Ending:
    """Return the ending of a run whose processes have ended, which is a failure if something is missing; correct its summary."""
    if ending.code != 0:
        return ending
    lacks = _correct(run.folder, run.settings)
    return Ending(_INCOMPLETE, sentence(run.folder, lacks)) if lacks else ending


def check_ended(folder: Path) -> None:
    """Raise PenstockError if the run in ``folder``, which has ended, left something out that is still missing."""
    if lacks := _correct(folder, load(folder / SETTINGS_FILE, environment={})):
        raise PenstockError(sentence(folder, lacks))


def _correct(folder: Path, settings: Settings) -> dict[str, str]:
    """Return what the run lacks, after a correction of its summary."""
    file = folder / "summary.json"
    summary = _read(file)
    lacks = missing(folder, settings, summary)
    if lacks != summary.get("missing", {}):
        write_whole(file, json.dumps({**summary, "missing": lacks}, indent=2, ensure_ascii=False) + "\n")
    return lacks


def missing(folder: Path, settings: Settings, summary: dict[str, Any]) -> dict[str, str]:
    """Return why each of policy, checkpoint and trackers is missing, by its name."""
    if not summary:
        return {"summary.json": "the coordinator ended before it was written; see its log"}
    said, steps = summary.get("missing", {}), int(summary["steps"])
    lacks = {name: said[name] for name in ("policy", "checkpoint") if name in said}
    policy = folder / "policy" / "config.json"
    if summary["state"] == "finished" and not policy.is_file():
        lacks.setdefault("policy", "see the trainer's log")
    elif "policy" in lacks and policy.is_file() and policy.stat().st_mtime >= (folder / "summary.json").stat().st_mtime:
        del lacks["policy"]  # written after the summary
    if has_checkpoint(folder, steps):
        lacks.pop("checkpoint", None)
    else:
        lacks.setdefault("checkpoint", f"{CHECKPOINTS}/{name_of(steps)} does not exist; see the trainer's log")
    return lacks | read_undelivered(folder, settings.tracking.sinks)


def sentence(folder: Path, lacks: dict[str, str]) -> str:
    """Say what is missing, and how to get it."""
    said = [f"the run ended without its {name}: {why}" for name, why in lacks.items()]
    if "policy" in lacks and "checkpoint" not in lacks:
        said.append(
            f"its weights are in the newest checkpoint: remove the cause, then `penstock export {shlex.quote(str(folder))}`"
        )
    return "\n".join(said)


def _read(file: Path) -> dict[str, Any]:
    summary = read_object(file)
    return summary if {"state", "steps"} <= summary.keys() else {}
