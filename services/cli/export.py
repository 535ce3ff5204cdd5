"""`penstock export`, by the coordinator or from files.

Both return version, step, folder and adapter. A given folder is written completely or not at all.
"""

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.services.offline.stored import export
from penstock.shared.bus.stores.policy.exports import check_free
from penstock.shared.errors import PenstockError, SettingsError
from penstock.shared.files.durable import whole_folder
from penstock.shared.settings import load_run

if TYPE_CHECKING:
    from penstock.services.client.coordinator import CoordinatorClient, JsonObject


def find_alive(run: Path, url: str, token_file: Path | None) -> "CoordinatorClient | None":
    """Return a client of the run's coordinator, if it answers.

    Raises:
        Unreachable: no answer at ``url``.
        Refused: a token is required.
    """
    from penstock.services.client.coordinator import CoordinatorClient, Unreachable, find, read_token

    if not url and not (run / "coordinator.json").is_file():
        return None
    place = find(url, run)
    asked = CoordinatorClient(place, read_token(token_file, place, run))
    try:
        run_id = asked.run().run_id
    except Unreachable:
        if url:
            raise
        return None
    return asked if url or run_id == _announced(run) else None  # the port may now be another run's


def _announced(run: Path) -> str:
    try:
        return str(json.loads((run / "coordinator.json").read_text(encoding="utf-8"))["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def number(text: str) -> int | None:
    """Return the version; None for ``latest``. Raises SettingsError: not a version."""
    if text == "latest":
        return None
    if not text.isdecimal():
        raise SettingsError(f"expected a version's number or latest, found {text!r}: change --version")
    return int(text)


def ask(asked: "CoordinatorClient", version: int | None, to: Path | None, *, adapter: bool) -> "JsonObject":
    """Have the trainer export a version (None: newest), and copy it to ``to``.

    Raises:
        PenstockError: it failed, or its files are not visible here.
    """
    if to is not None:
        check_free(to)
    exported = _latest(asked, adapter=adapter) if version is None else _export(asked, version, adapter=adapter)
    if to is None:
        return exported
    made = Path(exported["folder"])
    if not made.is_dir():
        raise PenstockError(
            f"the trainer wrote {made}, which this machine cannot see: copy it from there, or leave --to out"
        )
    _copy(made, to)
    return {**exported, "folder": str(to)}


def _export(asked: "CoordinatorClient", version: int, *, adapter: bool) -> "JsonObject":
    begun = asked.post(f"/v1/policies/{version}/export", {"adapter": adapter})
    result: JsonObject = asked.finished(begun, lambda detail: None)["result"]
    return result


def _latest(asked: "CoordinatorClient", *, adapter: bool) -> "JsonObject":
    """Export the head, or the newest checkpoint, which may be the head's: one that was written meanwhile."""
    from penstock.services.client.coordinator import RequestRefused

    head = asked.run().head
    if head is None:
        raise PenstockError("the run has no policy version yet: wait for the first")
    try:
        return _export(asked, head, adapter=adapter)
    except RequestRefused as error:
        known = asked.items("/v1/policies", 1_000_000)
        kept = [
            int(record["version"]) for record in known if record.get("checkpoint") and record.get("state") != "revoked"
        ]
        if not kept:
            raise PenstockError(f"{error}; trainer.checkpoint_every_steps sets when a checkpoint is written") from error
    return _export(asked, max(kept), adapter=adapter)


def make(run: Path, version: int | None, to: Path | None, *, adapter: bool) -> "JsonObject":
    """Export a version (None: newest) from files. Raises PenstockError: it failed, or a dependency is not installed."""
    settings = load_run(run)
    try:
        exported = export(settings, version, to, adapter=adapter)
    except OSError as error:
        raise PenstockError(f"could not write the policy: {error}: free disk space there, or change --to") from error
    return {"version": exported.version, "step": exported.step, "folder": exported.folder, "adapter": exported.adapter}


def _open_to_umask(folder: Path) -> None:
    """Undo the private modes of copied files."""
    umask = os.umask(0)
    os.umask(umask)
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def _copy(made: Path, to: Path) -> None:
    try:
        with whole_folder(to) as beside:
            shutil.copytree(made, beside, dirs_exist_ok=True)
            _open_to_umask(beside)
            if to.is_dir():
                to.rmdir()
    except OSError as error:
        raise PenstockError(f"could not write {to}: {error}: change --to") from error
