"""Pythons with packages that cannot live beside Penstock's own, made once a machine."""

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.waits import free_port, until

CACHE = Path(os.environ.get("PENSTOCK_TEST_ENVIRONMENTS", Path.home() / ".cache/penstock"))


def python_with(package: str) -> str:
    """Return a Python that has ``package``; skip the test where PyPI does not give it, except in CI."""
    folder = CACHE / package.replace("==", "-")
    python = folder / "bin/python"
    CACHE.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "made").exists():
            return str(python)
        try:
            made = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
            subprocess.run(made, check=True, capture_output=True)
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
            install = [*pip, "install", "-q", "--no-compile", package]
            subprocess.run(install, check=True, capture_output=True, timeout=900)
        except (subprocess.SubprocessError, OSError) as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(f"could not install {package}: {error}"[:300])
        (folder / "made").touch()
    return str(python)


@asynccontextmanager
async def served(*command: str | Path) -> AsyncIterator[int]:
    """Run a server during the body; its last argument, which is yielded, is the port where it listens."""
    port = free_port()

    def is_listening() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with subprocess.Popen([*command, str(port)]) as process:
        try:
            await until(is_listening)
            yield port
        finally:
            process.kill()
