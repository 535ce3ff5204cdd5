"""Secret files (tokens, keys) readable by one user."""

import contextlib
import os
import secrets
import stat
from pathlib import Path

from penstock.shared.errors import SettingsError

_SHORTEST = 16


def make_secret(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{secrets.token_hex(32)}\n")
        except OSError:
            path.unlink(missing_ok=True)
            raise


def read_secret(path: Path, setting: str, kind: str = "secret") -> bytes:
    """Return the first line of the file named by ``setting``. Raises SettingsError: it is missing or too short, or
    others can read it.
    """
    secret = read_private(path, setting, kind).partition(b"\n")[0].strip()
    if len(secret) < _SHORTEST:
        raise SettingsError(
            f"expected a {kind} of at least {_SHORTEST} characters in the first line of {path}, found {len(secret)}: "
            f"change {setting}"
        )
    return secret


def read_private(path: Path, setting: str, kind: str) -> bytes:
    """Return the content of the file named by ``setting``. Raises SettingsError: it cannot be read, or others can read
    or write it.
    """
    try:
        with path.open("rb") as file:
            _check_private(path, os.fstat(file.fileno()), kind)
            return file.read()
    except OSError as error:
        raise SettingsError(f"could not read the {kind} in {path} ({error.strerror}): change {setting}") from error


def _check_private(path: Path, status: os.stat_result, kind: str) -> None:
    """Raise SettingsError if other users may read or write a file.

    A mounted secret of Kubernetes belongs to root; our group may read it.
    """
    open_to = stat.S_IRWXO | (stat.S_IRWXG if status.st_uid == os.geteuid() else stat.S_IWGRP)
    if status.st_mode & open_to:
        raise SettingsError(
            f"expected a {kind} that no other user can read, found {path} with mode {stat.S_IMODE(status.st_mode):04o}: chmod 600 {path}, "
            "or mount it with mode 0400 (Kubernetes: defaultMode; Docker Compose: mode)"
        )
