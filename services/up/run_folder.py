"""A run's folder, lock, link `latest`, socket and snapshots.

A kernel lock limits a run to one `up`.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from penstock.services.up import process_tree
from penstock.shared.bus.keys import RUN_ID_PATTERN
from penstock.shared.errors import SettingsError
from penstock.shared.files.checkpoint_folder import checkpoint_folder
from penstock.shared.process.children import kill_group
from penstock.shared.settings import SETTINGS_FILE, Settings

NEXT_SETTINGS_FILE = "settings.next.toml"
"""A resume's settings until accepted."""
_MEMORY = Path("/dev/shm")  # noqa: S108
_SAME_START_S = 2.0
_LEFTOVER_S = 10.0


def has_checkpoint(folder: Path, step: int) -> bool:
    """Whether the checkpoint after ``step`` exists; step 0 has none."""
    return step == 0 or checkpoint_folder(folder, step).is_dir()


def new_run_id(config: Path) -> str:
    stem = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in config.stem
    )
    return f"{stem.strip('._-')[:40] or 'run'}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def make_run_folder(settings: Settings) -> Path:
    if RUN_ID_PATTERN.fullmatch(settings.run.id) is None:
        raise SettingsError(
            f"expected a run id of 1 to 64 letters, digits, '.', '_' or '-', found {settings.run.id!r}: change run.id"
        )
    folder = settings.run_folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        keep_private(folder)
        probe = folder / "up.lock"
        probe.touch(mode=0o600)
    except OSError as error:
        reason = "a file has that name" if isinstance(error, FileExistsError) else error.strerror
        raise SettingsError(f"could not write to the run's folder {folder} ({reason}): change run.folder") from error
    if (folder / SETTINGS_FILE).exists():
        raise SettingsError(
            f"a run exists in {folder}: continue it with `penstock up --resume {shlex.quote(str(folder))}`, or change run.id"
        )
    return folder


def keep_private(folder: Path) -> None:
    """Make a run's folder private, if it is this user's."""
    with contextlib.suppress(OSError):
        folder.chmod(0o700)


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Make files private that the body's processes create."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def lock(folder: Path) -> TextIO:
    """Raises SettingsError: another `up` holds it."""
    held = (folder / "up.lock").open("w")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        held.close()
        raise SettingsError(f"another `penstock up` runs {folder}: stop it first") from error
    return held


def link_latest(folder: Path) -> str:
    """Point `latest` at ``folder``; return the name of the folder that it pointed at, or ""."""
    link, beside = folder.parent / "latest", folder.parent / f".latest-{folder.name}"
    if link.exists() and not link.is_symlink():
        return ""
    before = link.readlink().name if link.exists() else ""
    beside.unlink(missing_ok=True)
    beside.symlink_to(folder.name)
    beside.replace(link)
    return before


def unlink_latest(folder: Path, before: str) -> None:
    """Point `latest`, if it still points at ``folder``, at the folder ``before``, or remove it."""
    link = folder.parent / "latest"
    if not link.is_symlink() or link.readlink().name != folder.name:
        return
    if before and before != folder.name and (folder.parent / before).is_dir():
        link_latest(folder.parent / before)
    else:
        link.unlink()


def end_leftovers(folder: Path) -> int:
    """End processes of a killed `up`; return the count."""
    try:
        table = json.loads((folder / "up.json").read_text(encoding="utf-8"))
        processes = [(int(row["pid"]), float(row["started_at_s"])) for row in table["processes"] if row["pid"]]
        socket = Path(str(table["bus"]).removeprefix("unix://"))
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    alive = [pid for pid, started_s in processes if _is_same(pid, started_s)]
    for pid in alive:
        kill_group(pid)
    deadline = time.monotonic() + _LEFTOVER_S
    while any(process_tree.is_alive(pid) for pid in alive) and time.monotonic() < deadline:
        time.sleep(0.02)
    if socket.parent.name.startswith("penstock-"):
        shutil.rmtree(socket.parent, ignore_errors=True)
    return len(alive)


def _is_same(pid: int, started_s: float) -> bool:
    found_s = process_tree.started_at_s(pid)
    return found_s is not None and abs(found_s - started_s) < _SAME_START_S and process_tree.is_alive(pid)


# ---------------------------------------------------------------- snapshots


def snapshot_folder(settings: Settings, keep_free: int) -> Path:
    """Return the snapshot folder: as set, else shared memory with ``keep_free`` bytes, else the run's folder."""
    if settings.weights.folder is not None:
        return settings.weights.folder.absolute()
    in_memory = settings.snapshot_folder
    try:
        if not _MEMORY.is_dir() or shutil.disk_usage(_MEMORY).free < keep_free:
            raise OSError("too small")
        in_memory.parent.mkdir(mode=0o700, exist_ok=True)
        in_memory.mkdir(mode=0o700, exist_ok=True)
        if in_memory.parent.stat().st_uid != os.getuid():
            raise OSError("somebody else's")
    except OSError:
        return settings.run_folder.absolute() / "weights"
    return in_memory


def mark_in_memory(folder: Path, run_folder: Path) -> None:
    """Record the owner of in-memory snapshots, for cleanup."""
    if is_in_memory(folder):
        folder.with_name(f"{folder.name}.run").write_text(str(run_folder), encoding="utf-8")


def remove_snapshots(folder: Path) -> None:
    if is_in_memory(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_name(f"{folder.name}.run").unlink(missing_ok=True)


def remove_shelves(folder: Path, *, has_letters: bool) -> None:
    """Delete what replicas kept of a run that has ended; the trainer's has what its journal needs, which may be nothing.

    Args:
        has_letters: it may be extended, and dead letters revived: what its replicas have not swept is left.
    """
    for shelf in (folder / "shelf").glob("*"):
        if not (has_letters or shelf.name.startswith("trainer")):
            shutil.rmtree(shelf, ignore_errors=True)
    for empty in (*(folder / "shelf").glob("*"), folder / "shelf"):
        with contextlib.suppress(OSError):
            empty.rmdir()


def remove_dead_snapshots() -> None:
    for mark in (_MEMORY / f"penstock-{os.getuid()}").glob("*.run"):
        try:
            run_folder = Path(mark.read_text(encoding="utf-8"))
            if not (run_folder / "up.lock").exists():
                raise FileNotFoundError
            held = lock(run_folder)
        except SettingsError:
            continue
        except OSError:
            held = None
        remove_snapshots(mark.with_suffix(""))
        if held is not None:
            held.close()


def model_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) if model.is_dir() else 0


def is_in_memory(folder: Path) -> bool:
    return folder.is_relative_to(_MEMORY / f"penstock-{os.getuid()}")
