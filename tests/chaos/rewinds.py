"""A run whose bus loses acknowledged steps, again and again: by failovers of Sentinel, and by older or damaged data.

::

    failovers    primary and replica swap places in every round; in every second one the replica does not follow the last steps
    returns      a server comes back with a copy of earlier data, with its append-only file cut, or with a byte changed

What was lost is worked out from the run's folder (its commits, its checkpoints) and what the server has, and compared with
what the run says.
"""

import asyncio
import contextlib
import dataclasses
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.commits import Commits, read_commits
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.client import connection
from penstock.shared.bus.client.server import Server
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.streams import AUDIT
from penstock.shared.errors import BusUnavailable
from tests.chaos.run import RUN_ID, Run, TcpServer, answers, running
from tests.conftest import PATIENCE_S, free_port, need, until
from tests.support.raw_redis import raw

_FLAGS: Mapping[str, object] = {"rollout.replicas": 1, "trainer.keep_last": 1}
_IN_STEP = {"min-replicas-to-write": "1", "min-replicas-max-lag": "2"}


@dataclasses.dataclass
class Figures:
    rounds: dict[str, int] = dataclasses.field(default_factory=dict)
    acknowledged: int = 0
    lost: int = 0
    """Steps that neither the server that came back nor a checkpoint has."""
    told: int = 0
    from_checkpoint: int = 0
    """Rounds after which the run continued from a checkpoint newer than the bus."""
    refused: int = 0
    """Servers that did not start with their damaged data, which were emptied."""
    trained_twice: int = 0

    def count(self, kind: str) -> None:
        self.rounds[kind] = self.rounds.get(kind, 0) + 1


class Losses:
    """Compares what the run says with what it lost."""

    def __init__(self, run: Run, figures: Figures) -> None:
        self._run, self._figures = run, figures
        self._told = 0

    async def held(self) -> tuple[Commits, int]:
        """Return the folder's commits and its newest checkpoint's version. While no bus answers: then none is added."""
        root, writer = self._run.folder / "checkpoints", self._run.pid("trainer-0")
        with contextlib.suppress(TimeoutError):  # a checkpoint is written beside training; of one that ended it stays
            await until(lambda: not any(root.glob(".step-*.tmp")) or self._run.pid("trainer-0") != writer)
        saved = max((checkpoint.state.version for checkpoint in local_store.find(root)), default=-1)
        return read_commits(self._run.folder), saved

    async def check(self, bus: Bus, newest: int | None, commits: Commits, saved: int) -> None:
        """Wait until the run goes on after its bus came back with the version ``newest``."""
        kept = max(-1 if newest is None else newest, saved)
        lost = [commit for commit in commits.kept if commit.groups and commit.version > kept]
        before = max(commit.step for commit in commits.kept) - len(lost)
        await self._run.until(lambda: self._goes_on(bus, before + 2, kept))
        told = (await Ledger(bus).status()).rewound
        self._figures.lost += len(lost)
        self._figures.told += told.steps - self._told
        self._figures.from_checkpoint += saved > (-1 if newest is None else newest)
        assert told.steps - self._told == len(lost), f"{told}, and lost were {lost}"
        self._told = told.steps

    async def _goes_on(self, bus: Bus, step: int, newest: int) -> bool:
        status = await Ledger(bus).status()
        return status.step >= step and status.newest_version is not None and status.newest_version > newest

    async def end(self, bus: Bus) -> None:
        """Stop the run and check its books."""
        await self._run.stop()
        status, counts = await Ledger(bus).account()
        assert sum(count for name, count in counts.items() if name != "requeued") == status.cursor, counts
        assert counts["trained"] == 8 * status.step
        assert not any(name.startswith("dead:") for name in counts), counts
        rows = await raw(bus).xrange(bus.keys.of(AUDIT))
        trained = Counter(fields[b"id"] for _, fields in rows if fields[b"outcome"] == b"trained")
        self._figures.trained_twice += sum(times - 1 for times in trained.values())
        self._figures.acknowledged += status.step
        console = (self._run.folder.parent / "up.txt").read_text()
        assert ("it had acknowledged" in console.replace("\n", " ")) == (self._told > 0), console[-3000:]


# ---------------------------------------------------------------- failovers


@contextlib.asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[tuple[list[TcpServer], int]]:
    """Yield a Redis primary and its replica, of which writes must reach one, and the port of their Sentinel."""
    binary, port = need("redis-server", "redis-server"), free_port()
    servers = [TcpServer(folder / name, binary) for name in ("a", "b")]
    lines = [
        f"port {port}",
        f"sentinel monitor penstock 127.0.0.1 {servers[0].port} 1",
        "sentinel down-after-milliseconds penstock 3000",
        "sentinel failover-timeout penstock 10000",
    ]
    (folder / "sentinel.conf").write_text("\n".join(lines))
    for server in servers:
        server.start()
    sentinel = subprocess.Popen(
        [need("redis-sentinel", "redis-sentinel"), "sentinel.conf"], cwd=folder, stdout=subprocess.DEVNULL
    )
    try:
        for number in (*(server.port for server in servers), port):
            await until(lambda number=number: answers(number), timeout_s=PATIENCE_S)
        await told(servers[1].port, "REPLICAOF", "127.0.0.1", str(servers[0].port))
        for server in servers:
            await _set(server, _IN_STEP)
        yield servers, port
    finally:
        sentinel.kill()
        sentinel.wait(PATIENCE_S)
        for server in servers:
            server.kill()


async def failovers(folder: Path, seeds: int, first: int = 0, *, alert: str = "") -> Figures:
    """Fail over ``seeds`` times, with odd seeds to a replica that lacks the last steps.

    ``alert``: to be raised for them, in a run without checkpoints.
    """
    figures = Figures()
    async with watched(folder) as (servers, port):
        url = f"redis+sentinel://127.0.0.1:{port}/penstock"
        flags = {**_FLAGS, "trainer.checkpoint_every_steps": 100_000} if alert else _FLAGS
        async with running(folder, url, flags, prometheus=bool(alert)) as run:
            bus, losses = await run.connect(url), Losses(run, figures)
            try:
                for seed in range(first, first + seeds):
                    await _fail_over(run, bus, losses, servers, port, seed)
                    figures.count("stalled" if seed % 2 else "in step")
                    servers.reverse()
                if alert:
                    firing = f'ALERTS{{alertname="{alert}",alertstate="firing"}}'
                    await run.until(lambda: run.prometheus.ask(firing))
                await losses.end(bus)
            finally:
                await bus.close()
    return figures


async def _fail_over(run: Run, bus: Bus, losses: Losses, servers: list[TcpServer], sentinel: int, seed: int) -> None:
    primary, replica = servers
    await run.until(lambda: _follows(replica, primary))
    await until(lambda: told(sentinel, "SENTINEL", "REPLICAS", "penstock"), timeout_s=PATIENCE_S)
    await run.more_steps(bus, 1 + random.Random(seed).randrange(6))
    if seed % 2:  # as within min-replicas-max-lag: it no longer follows, and writes are taken
        for server in servers:
            await _set(server, {"min-replicas-to-write": "0"})
        await _set(replica, {"masterauth": "wrong"})
        await told(primary.port, "CLIENT", "KILL", "TYPE", "replica")
        await run.more_steps(bus, 1 + random.Random(seed).randrange(4))
    primary.kill()
    newest, held = await _newest(replica.port), await losses.held()
    await run.until(lambda: _is_primary(replica))
    primary.start()  # Sentinel makes it the replica; until then no write is taken
    await until(lambda: answers(primary.port), timeout_s=PATIENCE_S)
    await losses.check(bus, newest, *held)
    await _set(replica, {**_IN_STEP, "masterauth": ""})
    await run.until(lambda: _follows(primary, replica))
    await _set(primary, _IN_STEP)


async def told(port: int, *words: str, wait_s: float = PATIENCE_S) -> Any:
    client = connection.open_client(f"redis://127.0.0.1:{port}")
    try:  # Sentinel closes all connections of a server whose role it changes
        return await Server(client, wait_s=wait_s).call(lambda: client.execute_command(*words))
    finally:
        await connection.close_client(client)


async def _set(server: TcpServer, values: Mapping[str, str]) -> None:
    for name, value in values.items():
        await told(server.port, "CONFIG", "SET", name, value)


async def _newest(port: int) -> int | None:
    """Return the newest version that a server knows of the run."""
    version = await told(port, "HGET", f"penstock:{{{RUN_ID}}}:run", "newest_version")
    return None if version is None else int(version)


async def _is_primary(server: TcpServer) -> bool:
    return bool((await told(server.port, "INFO", "replication"))["role"] == "master")


async def _follows(replica: TcpServer, primary: TcpServer) -> bool:
    of = await told(replica.port, "INFO", "replication")
    return (of["role"], of.get("master_port"), of.get("master_link_status")) == ("slave", primary.port, "up")


# ---------------------------------------------------------------- older or damaged data

HARMS = ("older", "cut", "changed")


async def returns(folder: Path, points: int, first: int = 0) -> Figures:
    """Have a server come back ``points`` times with other data than it had, each of ``HARMS`` in turn."""
    figures, server = Figures(), TcpServer(folder / "valkey")
    server.start()
    try:
        await until(lambda: answers(server.port), timeout_s=PATIENCE_S)
        async with running(folder, server.url, _FLAGS) as run:
            bus, losses = await run.connect(server.url), Losses(run, figures)
            try:
                for seed in range(first, first + points):
                    await _return(run, bus, losses, server, seed)
                    figures.count(HARMS[seed % len(HARMS)])
                await losses.end(bus)
            finally:
                await bus.close()
    finally:
        server.kill()
    return figures


async def _return(run: Run, bus: Bus, losses: Losses, server: TcpServer, seed: int) -> None:
    chance, harm = random.Random(seed), HARMS[seed % len(HARMS)]
    earlier = server.data.with_name("earlier")
    await run.more_steps(bus, 1 + chance.randrange(3))
    shutil.rmtree(earlier, ignore_errors=True)
    shutil.copytree(server.data, earlier)  # an append-only file may be copied at any moment
    await run.more_steps(bus, 1 + chance.randrange(12))
    server.kill()
    if harm == "older":
        shutil.rmtree(server.data)
        earlier.rename(server.data)
    else:
        _spoil(max((server.data / "appendonlydir").glob("*.incr.aof")), chance, harm)
    newest, held = await _read(server), await losses.held()
    if newest == -1:
        losses._figures.refused += 1
        shutil.rmtree(server.data)
    server.start()
    await until(lambda: answers(server.port), timeout_s=PATIENCE_S)
    await losses.check(bus, None if newest == -1 else newest, *held)


def _spoil(file: Path, chance: random.Random, harm: str) -> None:
    data = bytearray(file.read_bytes())
    place = int(len(data) * chance.uniform(0.3, 1.0))
    if harm == "cut":
        del data[place:]
    else:
        data[place] ^= 0xFF
    file.write_bytes(bytes(data))


async def _read(server: TcpServer) -> int | None:
    """Return the newest version in a server's data, by a second server with a copy; -1 if it does not start."""
    copy = TcpServer(server.data.with_name("copy"))
    shutil.rmtree(copy.data, ignore_errors=True)
    shutil.copytree(server.data, copy.data)
    copy.start()
    try:
        await until(lambda: _has_loaded_or_ended(copy), timeout_s=PATIENCE_S)
        return -1 if _has_ended(copy) else await _newest(copy.port)
    finally:
        copy.kill()


async def _has_loaded_or_ended(server: TcpServer) -> bool:
    with contextlib.suppress(BusUnavailable):
        await told(server.port, "PING", wait_s=0.0)  # an error while it loads
        return True
    return _has_ended(server)


def _has_ended(server: TcpServer) -> bool:
    return server.process is not None and server.process.poll() is not None


def figures_of(kind: str, folder: Path, rounds: int, first: int = 0) -> Figures:
    return asyncio.run((failovers if kind == "failovers" else returns)(folder, rounds, first))
