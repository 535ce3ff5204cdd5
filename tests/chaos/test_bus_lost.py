"""Laws of a run whose server is frozen, emptied or replaced."""

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.local_store import Checkpoint
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Event
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.streams import EVENTS
from tests.chaos.rewinds import failovers, returns
from tests.chaos.run import TcpServer, answers, harmed
from tests.conftest import PATIENCE_S, need, until

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
        for pause_s in (0.0, 0.3, 1.0):
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


@pytest.mark.debian
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_run_goes_on_with_the_replica_that_sentinel_promotes_and_says_what_that_had_not_received(
    tmp_path: Path,
) -> None:
    need("prometheus", "prometheus")
    figures = await failovers(tmp_path, 2, alert="PenstockBusRewound")
    assert figures.rounds == {"in step": 1, "stalled": 1}
    assert figures.told == figures.lost > 0
    assert figures.trained_twice == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_bus_that_comes_back_with_older_cut_or_changed_data_costs_what_no_checkpoint_holds(
    tmp_path: Path,
) -> None:
    figures = await returns(tmp_path, 3)
    assert figures.told == figures.lost
    assert figures.trained_twice == 0
