"""Processes that host episodes' environments, tools and agents: the parent's side of :mod:`child`.

They see neither the bus nor secrets. One that does not answer in time is killed, with the episodes that it hosts: these are
played again, which counts as an attempt only of those that may have caused it, and those are alone from then on.
"""

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Hashable, Mapping
from typing import Any

from prometheus_client import Counter

from penstock.shared.errors import NotHere, SettingsError, TemporaryError
from penstock.shared.process.children import kill_group, kill_marked, reap
from penstock.shared.process.parent import FOR_PYTHON
from penstock.shared.settings.rollout import EpisodesSettings

LOST = Counter(
    "penstock_episodes_hosts_lost_total", "Processes of users' code that ended: overdue, or died.", ["cause"]
)
for _cause in ("overdue", "died"):
    LOST.labels(_cause)
_NAMED = {"environment", "tools", "mcp", "agent", "setup_s", "tool_s", "deadline_s"}
"""The settings that a process is started with."""
_SLOTS = 4
"""Episodes that one process hosts, and that end with it."""
_LINE_BYTES = 1 << 24
_MARK = "PENSTOCK_EPISODES_PROCESS"
_SUSPECTS = 1024


class HostLost(TemporaryError):
    """The process died, or did not answer in time and was killed."""


class Host:
    """One process; :meth:`start` it first."""

    def __init__(self, settings: EpisodesSettings, slots: int = _SLOTS) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._reading: asyncio.Task[None] | None = None
        self._closing = False
        self._mark = secrets.token_hex(8)
        self.free = set(range(slots))
        self.starting: asyncio.Task[list[Any]] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._reading is not None and not self.is_dead

    @property
    def is_dead(self) -> bool:
        return self._closing or (self._reading is not None and self._reading.done())

    async def start(self, *, describe: bool = False) -> list[Any]:
        """Start it; return the schemas of the tools if asked. Raises SettingsError or HostLost."""
        of = self._settings
        named = {**of.model_dump(mode="json", include=_NAMED), "describe": describe}
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.services.episodes.drivers.child", json.dumps(named), str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={
                "OMP_NUM_THREADS": "1",
                _MARK: self._mark,
                **{name: os.environ[name] for name in FOR_PYTHON if name in os.environ},
            },
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        try:
            async with asyncio.timeout(of.setup_s + of.patience_s):
                ready = await self._read()
            if ready.get("ready") is not True:
                raise SettingsError(
                    f"could not load {of.name} ({ready.get('error')}): change [episodes], or PYTHONPATH"
                )
        except (TimeoutError, EOFError) as error:
            await self.close()
            words = f"a process of {of.name} was not ready within {of.setup_s:g} s (episodes.setup_s)"
            raise HostLost(words) from error
        except BaseException:
            await self.close()
            raise
        self._reading = asyncio.create_task(self._read_all())
        return list(ready.get("tools", ()))

    async def ask(self, slot: int, do: str, within_s: float, setting: str, **given: Any) -> Mapping[str, Any]:
        """Return a slot's answer.

        Raises:
            HostLost: it did not answer within ``within_s`` (``setting``), or died.
            NotHere: the process was lost by another's question.
            TemporaryError: the user's code says so, or failed.
        """
        if not self.alive:
            raise self._lost_by_another()
        assert self._process is not None
        assert self._process.stdin is not None
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(within_s):
                line = json.dumps({"id": number, "slot": slot, "do": do, "with": given}, default=str)
                self._process.stdin.write(line.encode() + b"\n")
                await self._process.stdin.drain()
                said: dict[str, Any] = await answer
        except TimeoutError as error:
            LOST.labels("overdue").inc()
            self.kill()
            words = f"{self._settings.name} did not answer `{do}` within {within_s:g} s (episodes.{setting})"
            raise HostLost(words) from error
        except ConnectionError as error:
            raise self._lost_by_another() from error
        except asyncio.CancelledError:
            self.kill()  # its thread is still busy
            raise
        finally:
            self._answers.pop(number, None)
        if "temporary" in said:
            raise TemporaryError(f"{self._settings.name}, `{do}`: {said['temporary']}")
        return said

    def leave(self, slot: int) -> None:
        """End what the slot's episode holds elsewhere, before the next question there."""
        if self.alive and self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps({"id": -1, "slot": slot, "do": "close", "with": {}}).encode() + b"\n")

    def _lost_by_another(self) -> NotHere:
        return NotHere(f"the process of {self._settings.name} was lost by another episode")

    async def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            answer: dict[str, Any] = json.loads(await self._process.stdout.readline())
        except ValueError as error:  # nothing, a partial line, a long one, or not JSON
            raise EOFError("the process died") from error
        return answer

    async def _read_all(self) -> None:
        try:
            while True:
                answer = await self._read()
                waiting = self._answers.get(answer.get("id", -1))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except EOFError:
            LOST.labels("died").inc(not self._closing)
        finally:
            was_killed = self._closing
            self.kill()
            error = self._lost_by_another() if was_killed else HostLost(f"the process of {self._settings.name} died")
            for waiting in self._answers.values():
                if not waiting.done():
                    waiting.set_exception(error)

    def kill(self) -> None:
        self._closing = True
        if self._process is not None and self._process.returncode is None:
            kill_group(self._process.pid)

    async def close(self) -> None:
        if self._process is None:
            return
        self.kill()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self.starting is not None and self.starting is not asyncio.current_task():
            self.starting.cancel()
            await asyncio.gather(self.starting, return_exceptions=True)
        await reap(self._process)
        await asyncio.to_thread(kill_marked, _MARK, self._mark)  # what it left in sessions of their own


class Hosts:
    """Processes as they are needed, ``_SLOTS`` episodes each."""

    def __init__(self, settings: EpisodesSettings) -> None:
        self._settings = settings
        self._hosts: list[Host] = []
        self._suspects: set[Hashable] = set()
        self.tools: list[Any] = []
        """The schemas of the tools, unless there is an agent."""

    async def open(self) -> None:
        """Load the user's code once, if any, and the schemas of its tools. Raises SettingsError or HostLost."""
        if not self._settings.has_code:
            return
        host = Host(self._settings)
        self.tools = await host.start(describe=not self._settings.agent)
        self._hosts.append(host)

    @contextlib.asynccontextmanager
    async def place(self, episode: Hashable) -> AsyncIterator[tuple[Host, int]]:
        """Hold a slot of a living process, one that is alone if the episode lost its process before. Raises HostLost."""
        dead = [host for host in self._hosts if host.is_dead]
        self._hosts = [host for host in self._hosts if not host.is_dead]
        is_suspect = episode in self._suspects
        host = None if is_suspect else next((host for host in self._hosts if host.free), None)
        if host is None:
            host = Host(self._settings, 1 if is_suspect else _SLOTS)
            host.starting = asyncio.create_task(host.start())
            self._hosts.append(host)
        slot = host.free.pop()
        try:
            await asyncio.gather(*(each.close() for each in dead))
            if host.starting is not None:
                await asyncio.shield(host.starting)
            yield host, slot
        except HostLost:
            self._suspects = {episode, *list(self._suspects)[:_SUSPECTS]}
            raise
        except SettingsError as error:  # it was loaded before: its module has changed
            raise HostLost(str(error)) from error
        finally:
            host.leave(slot)
            host.free.add(slot)

    async def close(self) -> None:
        for host in self._hosts:
            await host.close()
