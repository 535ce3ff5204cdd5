"""Hosts of one switch: network namespaces with an interface each, and none that all share."""

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

from tests.conftest import PATIENCE_S, need

_NUMBERS = itertools.count()


class Hosts:
    """Namespaces by name; use as a context manager."""

    def __init__(self, *names: str) -> None:
        self._prefix = f"penstock{os.getpid()}-{next(_NUMBERS)}"
        self.addresses = {name: f"10.78.0.{number}" for number, name in enumerate(names, 1)}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Hosts":
        need("ip", "iproute2")
        if os.getuid():
            pytest.skip("needs root for network namespaces")
        made = subprocess.run(["ip", "netns", "add", self._of("switch")], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"this system lets nobody make a network namespace: {made.stderr.strip()}")
        try:
            self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait(PATIENCE_S)
        for name in (*self.addresses, "switch"):
            subprocess.run(["ip", "netns", "del", self._of(name)], capture_output=True)

    def start(
        self, host: str, command: Sequence[str | Path], log: IO[str] | None = None, **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a process on ``host``, which ends with the hosts."""
        words = ["ip", "netns", "exec", self._of(host), *map(str, command)]
        process = subprocess.Popen(words, stdout=log, stderr=log, env=_environment(variables))
        self._processes.append(process)
        return process

    def run(self, host: str, command: Sequence[str | Path], **variables: str) -> subprocess.CompletedProcess[str]:
        words = ["ip", "netns", "exec", self._of(host), *map(str, command)]
        return subprocess.run(
            words, capture_output=True, text=True, timeout=PATIENCE_S, env=_environment(variables), check=False
        )

    def _of(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _connect(self) -> None:
        switch = self._of("switch")
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, (name, address) in enumerate(self.addresses.items(), 1):
            own, port = self._of(name), f"port{number}"
            _ip("netns", "add", own)
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", f"wire{number}", "netns", own)
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", own, "address", "add", f"{address}/24", "dev", f"wire{number}")
            _ip("-n", own, "link", "set", f"wire{number}", "up")
            _ip("-n", own, "link", "set", "lo", "up")


def module(name: str, *words: str | Path | int) -> list[str]:
    return [sys.executable, "-m", name, *map(str, words)]


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert not done.returncode, f"ip {' '.join(words)}: {done.stderr}"
