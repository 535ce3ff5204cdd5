"""``penstock eval``: evaluate a stored policy without a run."""

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from penstock.services.cli import export
from penstock.services.cli.reports.audit_rewards import fresh_executor
from penstock.services.cli.reports.data_check import held_out_rows
from penstock.services.coordinator.admission.dataset import Dataset
from penstock.services.coordinator.evaluation.results import sentence
from penstock.services.offline.stored import Stored, stored_version
from penstock.services.up.display import console
from penstock.shared.errors import SettingsError
from penstock.shared.settings import SETTINGS_FILE, Settings, load, load_run
from penstock.shared.settings.evaluation import HeldOutSet


def run(source: Path, flags: Sequence[str], version: str, problems: int | None, *, as_json: bool) -> None:
    """Evaluate and print. Raises PenstockError."""
    number = export.number(version)
    settings = _settings(source, flags, number)
    if not settings.evaluation.held_out:
        raise SettingsError("there is no held-out set: set evaluation.path, such as --evaluation.path heldout.jsonl")
    from penstock.services.offline.evaluation import evaluate  # imports the model libraries

    logging.getLogger("penstock.services.coordinator").addHandler(logging.NullHandler())  # bad rows are named below
    with contextlib.ExitStack() as opened:
        stored = _stored(source, settings, number, opened)
        settings = opened.enter_context(fresh_executor(stored.settings))
        results = evaluate(settings, stored.version, stored.step, problems, _name_bad_rows)
    if as_json:
        console.say_json([dataclasses.asdict(result) for result in results])
        return
    for result in results:
        turns = "" if result.turns is None else f"{result.turns:.1f} turns and {result.calls:.1f} calls an episode, "
        console.say(
            f"{sentence(result)} · {result.answered} of {result.problems} problems, {turns}{result.seconds:.1f} s"
        )


def _name_bad_rows(held_set: HeldOutSet, problems: Dataset) -> None:
    if problems.bad_rows:
        console.warn(held_out_rows(held_set, problems))


def _settings(source: Path, flags: Sequence[str], version: int | None) -> Settings:
    if source.is_dir():
        place = load_run(source).run
        return load(source / SETTINGS_FILE, flags, environment={}).model_copy(update={"run": place})
    if version is not None:
        raise SettingsError("--version is for a run's folder: leave it out, or give the folder instead of a TOML file")
    return load(source, flags)


def _stored(source: Path, settings: Settings, version: int | None, opened: contextlib.ExitStack) -> Stored:
    if source.is_dir() and settings.policy.model == load_run(source).policy.model:
        return opened.enter_context(stored_version(settings, version))
    return Stored(settings, 0, 0)
