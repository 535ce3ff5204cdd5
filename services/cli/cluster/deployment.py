"""A deployed run: its record in a local run folder, and the way to its coordinator through ``kubectl``."""

import base64
import collections
import contextlib
import dataclasses
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from penstock.services.cli.cluster import programs
from penstock.shared.errors import PenstockError
from penstock.shared.files.durable import write_whole

_RECORD = "deployment.json"
_FORWARDED = re.compile(r"Forwarding from (127\.0\.0\.1:\d+) ")
_ENDED_S = 10.0
_forwards: ContextVar[contextlib.ExitStack] = ContextVar("forwards")


@contextlib.contextmanager
def forwarding() -> Iterator[None]:
    """End the forwarding processes that the body starts."""
    with contextlib.ExitStack() as stack:
        before = _forwards.set(stack)
        try:
            yield
        finally:
            _forwards.reset(before)


@dataclasses.dataclass(frozen=True, slots=True)
class Deployment:
    """A release of the chart."""

    name: str
    namespace: str
    context: str
    token_secret: str
    """Empty: the one that the chart made."""

    @property
    def selector(self) -> str:
        """The label of everything that belongs to it."""
        return f"app.kubernetes.io/instance={self.name}"

    def kubectl(self, *words: str) -> list[str]:
        """Return a command line in the run's namespace; may raise PenstockError."""
        return programs.command("kubectl", self.context, self.namespace, words)

    def write(self, folder: Path) -> None:
        """Record it in ``folder``, to which ``latest`` then points."""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _RECORD, json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        from penstock.services.up.run_folder import link_latest

        link_latest(folder)

    def connect(self) -> tuple[str, str]:
        """Return the coordinator's URL, forwarded until :func:`forwarding` ends, and the token.

        Raises:
            PenstockError: no pod answers.
        """
        token = self._token()
        services = json.loads(programs.output(self.kubectl("get", "services", "-l", self.selector, "-o", "json")))
        ports = {
            service["metadata"]["name"]: {port["name"] for port in service["spec"]["ports"]}
            for service in services["items"]
        }
        name = next((name for name, own in ports.items() if "http" in own), "")
        if not name:
            raise PenstockError(f"no run {self.name} in namespace {self.namespace}: it was deleted, or never deployed")
        return f"http://{self._forward(name)}", token

    def _token(self) -> str:
        chosen = (
            [self.token_secret] if self.token_secret else ["-l", f"{self.selector},app.kubernetes.io/component=api"]
        )
        path = "{.data.token}" if self.token_secret else "{.items[*].data.token}"
        return (
            base64.b64decode(programs.output(self.kubectl("get", "secret", *chosen, "-o", f"jsonpath={path}")))
            .decode("latin-1")
            .strip()
        )

    def _forward(self, service: str) -> str:
        words = self.kubectl("port-forward", f"service/{service}", "--address", "127.0.0.1", ":8000")
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        end_later(process)
        assert process.stdout is not None
        match = _FORWARDED.match(process.stdout.readline())
        if match is None:
            assert process.stderr is not None
            process.terminate()
            said = process.stderr.read()
            raise PenstockError(
                f"no coordinator of {self.name} runs in namespace {self.namespace} ({said.strip()}): the run waits for its "
                f"pods, or has ended; `penstock doctor --cluster {self.name} --namespace {self.namespace}` says why, and `penstock "
                "delete` removes it"
            )
        # kubectl writes a line for each connection
        threading.Thread(target=collections.deque, args=(process.stdout, 0), daemon=True).start()
        return match[1]


def end_later(process: subprocess.Popen[str]) -> None:
    """End ``process`` when :func:`forwarding` ends."""
    _forwards.get().callback(_end, process)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_ENDED_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def find(folder: Path) -> Deployment | None:
    """Return the deployment recorded in a run's folder, if any."""
    try:
        return Deployment(**json.loads((folder / _RECORD).read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise PenstockError(f"could not read {folder / _RECORD}: {error}: deploy the run again") from error
