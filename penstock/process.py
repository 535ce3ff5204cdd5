"""The process ``penstock up`` of a run that was started from Python. It has a session of its own and outlives a notebook."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from penstock.inputs import FOLDER, Inputs
from penstock.services.up.run_folder import new_run_id, private_files
from penstock.shared.errors import SettingsError
from penstock.shared.settings import SETTINGS_FILE, loads

_LONGEST_TAIL = 4000
_WRONG_SETTINGS = 2


class UpProcess:
    """One ``penstock up``; :meth:`start` starts it once."""

    def __init__(self, words: list[str], folder: Path, toml: str = "", inputs: Inputs | None = None) -> None:
        self.folder = folder
        self._inputs = inputs
        self._words = words
        self._toml = toml
        self._process: subprocess.Popen[bytes] | None = None
        self._files: Path | None = None

    @classmethod
    def of_config(
        cls, config: str | Path | Mapping[str, Any], changes: Mapping[str, Any], inputs: Inputs
    ) -> "UpProcess":
        """Return a new run's process. Raises SettingsError if the settings are wrong."""
        named = Path("run.toml") if isinstance(config, Mapping) else Path(config)
        values: dict[str, Any] = {}
        for key, value in (*(config if isinstance(config, Mapping) else _read(named)).items(), *changes.items()):
            _set(values, key, value)
        for key, value in inputs.settings(Path(FOLDER)).items():  # until the run's folder is known
            _set(values, key, value)
        settings = loads(tomli_w.dumps(values), str(named), environment=os.environ)
        if not settings.run.id:
            settings = settings.model_copy(update={"run": settings.run.model_copy(update={"id": new_run_id(named)})})
        folder = settings.run_folder.absolute()
        paths = inputs.settings(folder / FOLDER)
        for key, value in paths.items():
            _set(values, key, value)
        toml = tomli_w.dumps(values)
        loads(toml, str(named), environment=os.environ)
        return cls(["run.toml", f"--run.id={settings.run.id}"], folder, toml, inputs if paths else None)

    @classmethod
    def of_folder(cls, folder: Path) -> "UpProcess":
        """Return the process that continues the run in ``folder``."""
        return cls(["--resume", str(folder)], folder)

    @property
    def started(self) -> bool:
        """Whether :meth:`start` was called."""
        return self._process is not None

    def start(self) -> None:
        """Start it in the working directory; its files are removed by :meth:`stop`. Raises SettingsError."""
        if self._inputs is not None:
            if any((self.folder / name).exists() for name in (FOLDER, SETTINGS_FILE)):
                raise SettingsError(
                    f"a run exists in {self.folder}: continue it with Run.open, or change run.id, or remove the folder"
                )
            with private_files():
                self._inputs.write(self.folder / FOLDER)
        place = self._files = Path(tempfile.mkdtemp(prefix="penstock-up-"))
        (place / "run.toml").write_text(self._toml, encoding="utf-8")
        words = [str(place / word) if word == "run.toml" else word for word in self._words]
        with (place / "output.txt").open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.services.cli", "up", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        """Whether it ended."""
        return self._process is not None and self._process.poll() is not None

    def failure(self) -> str:
        """Return why it ended, or "" while it runs or if it ended in order. Raises SettingsError for wrong settings."""
        if self._process is None or self._process.poll() in (None, 0):
            return ""
        said = self._said()
        if self._process.returncode == _WRONG_SETTINGS:
            raise SettingsError(said.removeprefix("penstock up: "))
        return f"`penstock up` ended with code {self._process.returncode}: {said}"

    def wait(self) -> None:
        """Wait for its end."""
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """End it in order, and wait."""
        if self._process is not None and not self.has_ended:
            self._process.send_signal(signal.SIGTERM)
        self.wait()
        if self._files is not None:
            shutil.rmtree(self._files, ignore_errors=True)

    def _said(self) -> str:
        output = (self._files or Path()) / "output.txt"
        text = output.read_bytes() if output.is_file() else b""
        return text[-_LONGEST_TAIL:].decode(errors="replace").strip()


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """Set ``key``, which may be dotted; None removes it."""
    *tables, name = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
    if value is None:
        values.pop(name, None)
    elif isinstance(value, Mapping):
        values[name] = {**values.get(name, {}), **_plain(value)}
    else:
        values[name] = _plain(value)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingsError(f"no settings file at {path}: check the path, or give the settings as a dict") from error
    except (OSError, ValueError) as error:
        raise SettingsError(f"could not read the settings file at {path}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return value
