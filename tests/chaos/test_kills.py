"""Every admitted prompt ends once and no version number is reused, whatever is killed.

A rollout replica, the reward, one of two trainer ranks, the coordinator and Valkey are killed in mid-work, and one
replica is frozen longer than its entries are kept. The tracker's process is killed too, and shows each step and each rollout table once.
"""

import contextlib
import functools
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.services.tracking.follower import Follower, finish
from penstock.services.tracking.sink_client import SinkClient
from penstock.services.tracking.sinks.sink import TrackedRun
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Event
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.streams import EVENTS
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import Run, left_behind, running
from tests.conftest import PATIENCE_S
from tests.support.trackers import READERS, TABLES

GROUPS, CHECKPOINT_EVERY = 8, 7
FLAGS = {
    "trainer.ranks": 2,
    "trainer.checkpoint_every_steps": CHECKPOINT_EVERY,
    "coordinator.sample_every_steps": 1,
    "tracking.sinks": '["tensorboard"]',
}


async def _kill_rank(run: Run, bus: Bus) -> None:
    """Kill the last rank while there is something to replay."""
    pid = run.pid("trainer-0")
    assert pid is not None
    ranks = psutil.Process(pid).children()
    killed = False
    while not killed:
        for rank in ranks:
            rank.suspend()
        if killed := (await Ledger(bus).status()).step % CHECKPOINT_EVERY != 0:
            ranks.pop().kill()
        for rank in ranks:
            rank.resume()
        if not killed:
            await run.more_steps(bus, 1)


async def _kill_sink(run: Run) -> None:
    """Kill the process that has the tracker's library."""
    pid = run.pid("tracking-0")
    assert pid is not None
    await run.until(lambda: psutil.Process(pid).children())
    psutil.Process(pid).children()[0].kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_whatever_is_killed_every_prompt_ends_once_and_no_version_is_reused(tmp_path: Path) -> None:
    async with running(tmp_path, flags=FLAGS) as run:
        bus = await run.connect()
        await run.more_steps(bus, 3)
        frozen = run.pid("rollout-1")
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        for name in ("rollout-0", "reward-0", "coordinator-0", "trainer-0", "sink", "tracking-0", "valkey"):
            if name == "trainer-0":
                await _kill_rank(run, bus)
            elif name == "sink":
                await _kill_sink(run)
            else:
                await run.until(functools.partial(run.send, name, signal.SIGKILL))
            await run.more_steps(bus, 4)
            with contextlib.suppress(ProcessLookupError):
                os.kill(frozen, signal.SIGCONT)
        await bus.close()
        await run.stop()
    async with left_behind(run) as bus:
        await _audit(bus, run.folder)


async def _audit(bus: Bus, folder: Path) -> None:
    status = await Ledger(bus).status()
    assert (status.state, status.step >= 31) == (RunState.STOPPED, True)
    counts = await audit_groups(bus)
    assert counts["trained"] == status.step * GROUPS
    await audit_versions(bus)
    lines = _lines(folder, "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, status.step + 1)), "a replayed step is not reported again"
    await _deliver_rest(bus, folder)
    shown = READERS["tensorboard"](folder, folder.name, "train/reward")
    assert [step for step, _ in shown] == list(range(1, status.step + 1)), "a tracker shows each step once"
    tables = [(rows[0][0], rows[0][5]) for _, _, rows in TABLES["tensorboard"](folder, folder.name)]
    recorded = [(str(line["step"]), line["completions"][0]["text"]) for line in _lines(folder, "rollouts.jsonl")]
    assert tables == recorded, "and each recorded group once"
    assert "journal replayed" in [event.name for _, event in await bus.newest(EVENTS, Event, 10_000)]


async def _deliver_rest(bus: Bus, folder: Path) -> None:
    """Start the tracker once more: at the run's end it had ten seconds."""

    async def tell(name: str, detail: str) -> None:
        pytest.fail(f"{name}: {detail}")

    client = SinkClient("tensorboard", TrackedRun(folder.name, "penstock", folder, {}), PATIENCE_S)
    await finish([Follower("tensorboard", bus, folder, client, tell)], PATIENCE_S)


def _lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]
