"""Secrets in files: tokens, and what processes of one replica share. A file's first line; never in settings, which are dumped."""

from pathlib import Path

from shared.errors import SettingsError

_SHORTEST = 16


def read_secret(path: Path, setting: str, what: str = "secret") -> bytes:
    """Return the first line of the file that ``setting`` names.

    Raises:
        SettingsError: there is none, or it is too short to be a secret.
    """
    try:
        found = path.read_bytes().partition(b"\n")[0].strip()
    except OSError as error:
        raise SettingsError(f"expected a {what} in {path}, found: {error.strerror}: change {setting}") from error
    if len(found) < _SHORTEST:
        raise SettingsError(
            f"expected a {what} of at least {_SHORTEST} characters in the first line of {path}, found {len(found)}: "
            f"change {setting}"
        )
    return found
