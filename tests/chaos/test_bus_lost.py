"""Laws of a run whose server is frozen, emptied or replaced."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from services.trainer.checkpoint import local_store
from services.trainer.checkpoint.local_store import Checkpoint
from shared.bus.bus import Bus
from shared.bus.client import connection
from shared.bus.messages import Event
from shared.bus.stores.policy.ledger import Ledger
from shared.bus.streams import EVENTS
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import RUN_ID, TcpServer, answers, harmed, running
from tests.conftest import PATIENCE_S, free_port, need, until
from tests.support.raw_redis import raw

FROZEN_S = float(os.environ.get("PENSTOCK_FREEZE_S", "30"))
"""Longer than lease (3 s), heartbeat TTL (2.5 s), internal.claim_after_s (2 s), bus.drain_s (5 s) and connection
timeout (30 s).
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_server_that_comes_back_empty_costs_what_was_in_flight_and_no_more(tmp_path: Path) -> None:
    async with harmed(tmp_path) as (run, server, _, bus):
        await run.more_steps(bus, 6)
        await _freeze(server)
        await run.more_steps(bus, 2)
        await run.until(lambda: _in_flight(local_store.find(run.folder / "checkpoints")[-1]))
        before = [record.version for record in await Ledger(bus).policies()]
        server.kill()
        server.empty()
        server.start()
        await until(lambda: answers(server.port), timeout_s=PATIENCE_S)
        await run.until(lambda: _restored(bus))
        [restored] = await _restored(bus)
        checkpoint = local_store.read(run.folder / "checkpoints" / f"step-{restored['step']:06d}")
        await run.more_steps(bus, 3)
        await run.stop()
        status, counts = await Ledger(bus).account()
        assert counts["dropped:bus_lost"] == _in_flight(checkpoint)
        assert sum(count for name, count in counts.items() if name != "requeued") == status.cursor
        assert counts["trained"] == status.step * 8
        made = [
            record for record in await Ledger(bus).policies() if record.manifest_digest
        ]  # others: checkpoints' versions
        assert min(record.version for record in made) > max(before), "no number is used again"


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_server_that_is_emptied_at_any_moment_restarts_no_process(tmp_path: Path) -> None:
    async with harmed(tmp_path) as (run, server, _, bus):
        await run.more_steps(bus, 6)  # a checkpoint is there
        pids = {row["name"]: row["pid"] for row in run.table()["processes"]}
        for pause_s in (0.0, 0.3, 1.0, 0.1, 0.5):
            await asyncio.sleep(pause_s)
            server.kill()
            server.empty()
            server.start()
            await until(lambda: answers(server.port), timeout_s=PATIENCE_S)
            await run.until(lambda: _restored(bus))
            await run.more_steps(bus, 3)
        assert {row["name"]: row["pid"] for row in run.table()["processes"]} == pids
        await run.stop()
        status, counts = await Ledger(bus).account()
        assert sum(count for name, count in counts.items() if name != "requeued") == status.cursor
        assert counts["trained"] == status.step * 8


async def _freeze(server: TcpServer) -> None:
    server.send(signal.SIGSTOP)
    await asyncio.sleep(FROZEN_S)
    server.send(signal.SIGCONT)


def _in_flight(checkpoint: Checkpoint | None) -> int:
    if checkpoint is None:
        return 0
    return checkpoint.state.cursor - sum(n for name, n in checkpoint.state.counts.items() if name != "requeued")


async def _restored(bus: Bus) -> list[Mapping[str, Any]]:
    return [event.fields for _, event in await bus.newest(EVENTS, Event, 1000) if event.name == "run restored"]


@contextlib.asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[tuple[TcpServer, int, str]]:
    """Yield a Redis primary with replica and sentinel: primary, sentinel port, bus URL."""
    binary, port = need("redis-server", "redis-server"), free_port()
    primary = TcpServer(folder / "primary", binary)
    replica = TcpServer(folder / "replica", binary)
    lines = [
        f"port {port}",
        f"sentinel monitor penstock 127.0.0.1 {primary.port} 1",
        "sentinel down-after-milliseconds penstock 10000",
        "sentinel failover-timeout penstock 10000",
    ]
    (folder / "sentinel.conf").write_text("\n".join(lines))
    primary.start()
    replica.start()
    sentinel = subprocess.Popen(
        [need("redis-sentinel", "redis-sentinel"), "sentinel.conf"], cwd=folder, stdout=subprocess.DEVNULL
    )
    try:
        for number in (primary.port, replica.port, port):
            await until(lambda number=number: answers(number), timeout_s=PATIENCE_S)
        await _told(replica.port, "REPLICAOF", "127.0.0.1", str(primary.port))
        yield primary, port, f"redis+sentinel://127.0.0.1:{port}/penstock"
    finally:
        sentinel.kill()
        sentinel.wait(PATIENCE_S)
        primary.kill()
        replica.kill()


async def _told(port: int, *words: str) -> Any:
    client = connection.open_client(f"redis://127.0.0.1:{port}")
    try:
        return await client.execute_command(*words)
    finally:
        await connection.close_client(client)


@pytest.mark.debian
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_run_goes_on_with_the_replica_that_sentinel_makes_the_primary(tmp_path: Path) -> None:
    async with watched(tmp_path) as (primary, sentinel, url), running(tmp_path, url, {"rollout.replicas": 1}) as run:
        bus = await run.connect(url)
        await run.more_steps(bus, 2)
        await until(lambda: _has_replica(primary), timeout_s=PATIENCE_S)
        # sentinels look for replicas every ten seconds
        await until(lambda: _told(sentinel, "SENTINEL", "REPLICAS", "penstock"), timeout_s=PATIENCE_S)
        primary.kill()
        await run.more_steps(bus, 3)
        await run.stop()
        await audit_groups(bus)
        await audit_versions(bus)
        await bus.close()


async def _has_replica(primary: TcpServer) -> bool:
    bus = await Bus.connect(primary.url, RUN_ID, wait_s=PATIENCE_S)
    replication = await raw(bus).info("replication")
    await bus.close()
    return any(isinstance(row, dict) and row.get("state") == "online" for row in replication.values())
