"""A real run, by default the arithmetic example.

::

    harness ──direct──▶ Valkey ◀── fault proxy ◀── every process of the run
       │                  └ the harness's own: it may be killed, frozen, emptied, and started again
       └── up ──▶ coordinator-0, rollout-0, …       └── by hand: rollout-7, coordinator-spare, …

``bus=None`` leaves the bus to ``up`` (embedded).
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx

from penstock.services.client.coordinator import TOKEN_FILE, read_token
from penstock.shared.bus import embedded
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from tests.support import forge
from tests.support.fault_proxy import FaultProxy
from tests.support.forge import Started
from tests.support.prometheus_server import Prometheus
from tests.support.waits import PATIENCE_S, free_port, until, words

ROOT = Path(__file__).parent.parent.parent
RUN_ID = "chaos"
FLAGS: Mapping[str, object] = {
    "run.id": RUN_ID,
    "run.steps": 100_000,
    "sampling.group_size": 8,
    "algorithm.groups_per_step": 8,
    "algorithm.max_lag": 2,
    "internal.claim_after_s": 2,
    "bus.drain_s": 5,
    "internal.heartbeat_s": 0.5,
    "trainer.checkpoint_every_steps": 5,
    "trainer.keep_last": 3,
    "evaluation.every_steps": 100_000,
    "evaluation.path": forge.FEW_PROBLEMS,
}


class TcpServer:
    def __init__(self, data: Path, binary: str = "") -> None:
        self.data = data
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._binary = binary
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = embedded.command(Path("unused"), self.data)
        options = dict(zip(words[1::2], words[2::2], strict=True))
        for name in ("--unixsocket", "--unixsocketperm"):
            options.pop(name)
        options |= {"--port": str(self.port), "--bind": "127.0.0.1"}
        command = [self._binary or words[0], *(word for pair in options.items() for word in pair)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def empty(self) -> None:
        shutil.rmtree(self.data)


class Run:
    def __init__(
        self,
        folder: Path,
        bus_url: str | None = None,
        flags: Mapping[str, object] | None = None,
        config: str = "config/arithmetic.toml",
        prometheus: bool = False,
        forked: bool = True,
        command: str = "up",
    ) -> None:
        self.folder = folder / RUN_ID
        self._bus_url = bus_url
        values = {**FLAGS, "run.folder": folder, **(flags or {})}
        if bus_url is not None:
            values["bus.url"] = bus_url
        self._output = folder / "up.txt"
        self.prometheus = Prometheus(self._output)
        self._by_hand: dict[str, Started] = {}
        self._answered = ""
        self._forked = forked
        given = [f"--{name}={value}" for name, value in values.items() if value is not None]
        words = [command, config, *(["--prometheus"] if prometheus else []), *given]
        with self._output.open("w") as output:
            self.process = forge.start("penstock.services.cli", words, output, forked=forked)

    def table(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.folder / "up.json").read_text()))
        return {"processes": []}

    def pid(self, name: str) -> int | None:
        if name in self._by_hand:
            return self._by_hand[name].pid
        return next((row["pid"] for row in self.table()["processes"] if row["name"] == name), None)

    def names(self, service: str) -> list[str]:
        theirs = [row["name"] for row in self.table()["processes"] if row["service"] == service and row["pid"]]
        return theirs + [
            name for name, process in self._by_hand.items() if name.startswith(service) and process.poll() is None
        ]

    def send(self, name: str, number: int) -> bool:
        """Send a signal; False if not running."""
        pid = self.pid(name)
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def join(self, service: str, name: str, *flags: str) -> None:
        words = ["--config", self.folder / "settings.toml", "--replica", name, *flags]
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            self._by_hand[name] = forge.start(f"penstock.services.{service}", words, log, forked=self._forked)

    async def left(self, name: str) -> int:
        """Return the exit code of a process started by hand."""
        process = self._by_hand[name]
        await until(lambda: process.poll() is not None, timeout_s=PATIENCE_S)
        del self._by_hand[name]
        return process.wait()

    def check(self) -> None:
        if self.process.poll() is not None:
            raise AssertionError(f"`penstock up` ended early ({self.process.returncode}):\n{self.report()}")

    def check_joined(self, names: Iterable[str]) -> None:
        """Fail if a process started by hand has ended."""
        ended = {name: code for name in names if (code := self._by_hand[name].poll()) is not None}
        assert not ended, f"{ended} ended early:\n{self.report()}"

    def report(self) -> str:
        logs = [f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted((self.folder / "logs").glob("*.log"))]
        return "\n".join([self._output.read_text()[-3000:], self._answered, *logs])

    def close(self) -> None:
        for process in self._by_hand.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(PATIENCE_S)
        if self.process.poll() is None:
            for row in self.table()["processes"]:
                with contextlib.suppress(ProcessLookupError, TypeError):
                    os.kill(row["pid"], signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.terminate()  # the second time: at once
                self.process.wait(PATIENCE_S)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for ``condition()``; fail with all logs on timeout or if the run ended early."""

        async def met() -> object:
            self.check()
            result = condition()
            return await result if asyncio.iscoroutine(result) else result

        try:
            await until(met, timeout_s=PATIENCE_S)
        except TimeoutError as error:
            raise TimeoutError(f"{words(condition)} not met: {error}\n{self.report()}") from error

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        run_id: str = RUN_ID,
    ) -> httpx.Response | None:
        """Ask any coordinator; None if none answers."""
        self._answered = f"{method} {path}: no answer"
        announced, token = self.folder.parent / run_id / "coordinator.json", self.folder / TOKEN_FILE
        with contextlib.suppress(OSError, ValueError, httpx.HTTPError):
            url = json.loads(announced.read_text())["url"]
            sent = {"Authorization": f"Bearer {read_token(token if token.exists() else None)}", **(headers or {})}
            # plain HTTP: an SSL context would cost 40 ms; patient: a command that is repeated may be obeyed twice
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False, verify=False) as client:
                answer = await client.request(method, path, json=body, headers=sent)
            self._answered = f"{method} {path}: {answer.status_code} {answer.text[:500]}"
            return answer
        return None

    async def command(
        self, path: str, body: Mapping[str, object] | None = None, run_id: str = RUN_ID
    ) -> dict[str, Any]:
        report: dict[str, Any] = {}

        async def done() -> bool:
            answer = await self.ask("POST", path, body, run_id=run_id)
            if answer is None or not answer.is_success:
                return False
            report.update(answer.json())
            return True

        await self.until(done)
        return report

    async def change(self, **changes: object) -> None:
        settings = {name.replace("__", "."): value for name, value in changes.items()}

        async def changed() -> bool:
            seen = await self.ask("GET", "/v1/run/settings")
            if seen is None or not seen.is_success:
                return False
            body, headers = {"changes": settings, "reason": "the test"}, {"If-Match": seen.headers["ETag"]}
            answer = await self.ask("PATCH", "/v1/run/settings", body, headers)
            assert answer is None or answer.status_code != 422, answer.text
            return answer is not None and answer.is_success

        await self.until(changed)

    async def connect(self, url: str | None = None) -> Bus:
        await self.until(
            lambda: self.table().get("pid") == self.process.pid and "bus" in self.table()
        )  # not an earlier start's
        bus = await Bus.connect(url or str(self.table()["bus"]), RUN_ID, wait_s=PATIENCE_S)
        bus.wait_for_ever()
        return bus

    async def more_steps(self, bus: Bus, count: int) -> None:
        ledger = Ledger(bus)
        goal = (await ledger.status()).step + count

        async def reached() -> bool:
            return (await ledger.status()).step >= goal

        await self.until(reached)

    async def stop(self) -> None:
        await self.command("/v1/run/stop", {"reason": "the test is over"})
        try:
            code = await asyncio.to_thread(self.process.wait, PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            alive = [row["name"] for row in self.table()["processes"] if row["pid"]]
            raise AssertionError(
                f"`penstock up` has not ended {PATIENCE_S:.0f} s after the stop; alive: {alive}\n{self.report()}"
            ) from error
        assert code == 0, self.report()


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    bus_url: str | None = None,
    flags: Mapping[str, object] | None = None,
    config: str = "config/arithmetic.toml",
    prometheus: bool = False,
    forked: bool = True,
    command: str = "up",
) -> AsyncIterator[Run]:
    """A run that ends with the body; ``forked``: processes by ``tests/support/forge.py``."""
    run = Run(folder, bus_url, flags, config, prometheus, forked, command)
    try:
        yield run
    finally:
        await asyncio.to_thread(run.close)


@contextlib.asynccontextmanager
async def harmed(
    folder: Path,
    seed: int = 0,
    flags: Mapping[str, object] | None = None,
    *,
    config: str = "config/arithmetic.toml",
    forked: bool = True,
) -> AsyncIterator[tuple[Run, TcpServer, FaultProxy, Bus]]:
    """A run behind a proxy, its Valkey, and a direct bus."""
    server = TcpServer(folder / "valkey")
    server.start()
    proxy = FaultProxy("127.0.0.1", server.port, seed)
    bus = None
    try:
        await until(lambda: answers(server.port), timeout_s=PATIENCE_S)
        url = f"redis://127.0.0.1:{await proxy.start()}"
        async with running(folder, url, flags, config, forked=forked) as run:
            bus = await run.connect(server.url)
            yield run, server, proxy, bus
    finally:
        if bus is not None:
            await bus.close()
        await proxy.close()
        server.kill()


@contextlib.asynccontextmanager
async def left_behind(run: Run) -> AsyncIterator[Bus]:
    """The bus of a finished run, from its embedded Valkey's files."""
    with embedded.serving(run.folder / "valkey") as url:
        bus = await Bus.connect(url, RUN_ID, wait_s=PATIENCE_S)
        yield bus
        await bus.close()


async def steps_of(run: Run) -> int:
    """Return the steps that a run had made when it ended."""
    async with left_behind(run) as bus:
        return (await Ledger(bus).status()).step


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


async def is_in(bus: Bus, state: RunState) -> bool:
    return (await Ledger(bus).status()).state is state
