"""`penstock export`: asks the coordinator of a run that goes on, and reads the files of one that does not.

What it returns is the same both ways: version, step, folder, adapter. A folder that was named by a person is written whole or not at all.
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import PenstockError
from shared.exports import check_free, export_folder
from shared.messages import PolicyVersion

if TYPE_CHECKING:
    from services.client import Coordinator, JsonObject


def find_alive(run: Path, url: str, token_file: Path | None) -> "Coordinator | None":
    """Return the client of the run's coordinator; None where none answers for this run.

    Raises:
        Unreachable: ``url`` was given, and nobody answers there.
        Refused: the coordinator wants a token.
    """
    from services.client import Coordinator, Unreachable, find, read_token

    if not url and not (run / "coordinator.json").is_file():
        return None
    asked = Coordinator(find(url, run), read_token(token_file))
    try:
        found = asked.run().run_id
    except Unreachable:
        if url:
            raise
        return None
    return asked if url or found == _announced(run) else None  # another run's may have its port by now


def _announced(run: Path) -> str:
    try:
        return str(json.loads((run / "coordinator.json").read_text(encoding="utf-8"))["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def ask(asked: "Coordinator", version: int, to: Path | None, *, adapter: bool) -> "JsonObject":
    """Have the run's trainer write a version, and wait for it; copy it to ``to`` where one is named.

    Raises:
        PenstockError: it cannot be made, or what was made is not to be seen from here.
    """
    if to is not None:
        check_free(to)
    begun = asked.post(f"/v1/policies/{version}/export", {"adapter": adapter})
    found: JsonObject = asked.finished(begun, lambda detail: None)["result"]
    if to is None:
        return found
    made = Path(found["folder"])
    if not made.is_dir():
        raise PenstockError(
            f"expected to see {made}, where the trainer wrote it, found that this machine does not: copy it from there, or "
            "leave --to out"
        )
    _copy(made, to)
    return {**found, "folder": str(to)}


def make(run: Path, version: int, to: Path | None, *, adapter: bool) -> "JsonObject":
    """Write a version from the run's files, in this process.

    Raises:
        PenstockError: it cannot be made, or what it needs is not installed.
    """
    try:
        from services.trainer.export import export_version, settings_of
    except ImportError as error:
        raise PenstockError(f"expected penstock[trainer] for export, found {error}: install it") from error
    settings, number = settings_of(run), PolicyVersion(version)
    folder = to or export_folder(settings, number, adapter=adapter)
    found = export_version(settings, number, folder, adapter=adapter)
    return {"version": found.version, "step": found.step, "folder": found.folder, "adapter": found.adapter}


def _copy(made: Path, to: Path) -> None:
    beside = to.with_name(f".{to.name}.tmp")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.copytree(made, beside)
        if to.is_dir():
            to.rmdir()
        beside.rename(to)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise PenstockError(f"expected to write {to}, found: {error}: change --to") from error
