"""The law of the whole: whatever is killed, every admitted prompt ends exactly once and no version number is used twice.

A real run of the arithmetic example on two trainer ranks, started by ``penstock up``. A rollout replica, the reward, a trainer
rank, the coordinator and Valkey are killed by SIGKILL in mid-work, one after the other, and one replica is frozen for longer
than its entries are kept. Afterwards the audit is read from what Valkey left on disk.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared import embedded
from shared.bus import Bus
from shared.ledger import Ledger, RunState
from shared.messages import Event, PolicyUpdate
from shared.streams import AUDIT, EVENTS, POLICY, TRAINING_STREAMS
from tests.conftest import until

ROOT = Path(__file__).parent.parent
CONFIG = "config/arithmetic.toml"
STEPS, GROUPS, CHECKPOINT_EVERY = 60, 8, 7
FLAGS = {
    "run.id": "chaos",
    "run.steps": STEPS,
    "sampling.group_size": 8,
    "algorithm.groups_per_step": GROUPS,
    "algorithm.max_lag": 2,
    "trainer.ranks": 2,
    "trainer.checkpoint_every_steps": CHECKPOINT_EVERY,
    "bus.claim_after_s": 2,
    "bus.drain_s": 5,
    "evaluation.every_steps": 1000,
}


class Chaos:
    """A run whose processes are killed."""

    def __init__(self, folder: Path, config: str = CONFIG, settings: Mapping[str, object] = FLAGS) -> None:
        self.folder = folder / str(settings["run.id"])
        flags = [f"--{name}={value}" for name, value in {**settings, "run.folder": folder}.items()]
        self.output = folder / "up.txt"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services", "up", config, *flags],
            cwd=ROOT, stdout=self.output.open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def table(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.folder / "up.json").read_text()))
        return {"processes": []}

    def pid(self, name: str) -> int | None:
        return next((row["pid"] for row in self.table()["processes"] if row["name"] == name), None)

    def check(self) -> None:
        if self.process.poll() is not None:
            logs = "\n".join(path.read_text()[-2000:] for path in sorted((self.folder / "logs").glob("*.log")))
            pytest.fail(f"`penstock up` ended early ({self.process.returncode}):\n{self.output.read_text()}\n{logs}")

    async def kill(self, name: str) -> None:
        pid = self.pid(name)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.check()

    async def kill_rank(self, ledger: Ledger) -> None:
        """Kill the last rank where the newest checkpoint is behind the ledger, so that there is something to replay."""
        pid = self.pid("trainer-0")
        assert pid is not None
        ranks = [child for child in psutil.Process(pid).children() if "services.trainer" in child.cmdline()]
        killed = False
        while not killed:
            for rank in ranks:
                rank.suspend()
            if killed := (await ledger.status()).step % CHECKPOINT_EVERY != 0:
                ranks.pop().kill()
            for rank in ranks:
                rank.resume()
            if not killed:
                await more_steps(self, ledger, 1)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()


@contextlib.asynccontextmanager
async def running(folder: Path, config: str = CONFIG, settings: Mapping[str, object] = FLAGS) -> AsyncIterator[Chaos]:
    chaos = Chaos(folder, config, settings)
    try:
        yield chaos
    finally:
        await asyncio.to_thread(chaos.close)


async def connect(chaos: Chaos) -> Bus:
    def started() -> bool:
        chaos.check()
        return "bus" in chaos.table()

    await until(started, timeout_s=30.0)
    return await Bus.connect(str(chaos.table()["bus"]), chaos.folder.name, wait_s=30.0)


async def more_steps(chaos: Chaos, ledger: Ledger, count: int) -> None:
    """Wait until ``count`` more steps are committed: work goes on, with entries in every hand."""
    goal = (await ledger.status()).step + count
    assert goal < STEPS, "the run is too short for what should happen to it"

    async def reached() -> bool:
        chaos.check()
        return (await ledger.status()).step >= goal

    await until(reached, timeout_s=90.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_whatever_is_killed_every_prompt_ends_once_and_no_version_is_reused(tmp_path: Path) -> None:
    async with running(tmp_path) as chaos:
        bus = await connect(chaos)
        bus.wait_for_ever()
        ledger = Ledger(bus)
        await more_steps(chaos, ledger, 3)
        frozen = chaos.pid("rollout-1")
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        for name in ("rollout-0", "reward-0", "coordinator-0", "trainer-0", "valkey"):
            await (chaos.kill_rank(ledger) if name == "trainer-0" else chaos.kill(name))
            await more_steps(chaos, ledger, 4)
            with contextlib.suppress(ProcessLookupError):
                os.kill(frozen, signal.SIGCONT)
        await bus.close()
        assert await asyncio.to_thread(chaos.process.wait, 120) == 0, chaos.output.read_text()
    await _audit(chaos.folder)


async def _audit(folder: Path) -> None:
    async with left_behind(folder) as bus:
        await audit_groups(bus, STEPS, GROUPS)
        await _audit_versions(bus, folder)


@contextlib.asynccontextmanager
async def left_behind(folder: Path) -> AsyncIterator[Bus]:
    """The bus of a run that is over, from what Valkey left on disk."""
    socket = embedded.socket_path("audit")
    server = subprocess.Popen(embedded.command(socket, folder / "valkey"), stdout=subprocess.DEVNULL)
    try:
        bus = await Bus.connect(embedded.url(socket), folder.name, wait_s=20.0)
        yield bus
        await bus.close()
    finally:
        server.kill()
        server.wait(10)
        socket.unlink(missing_ok=True)
        socket.parent.rmdir()


async def audit_groups(bus: Bus, steps: int, groups: int) -> None:
    status, counts = await Ledger(bus).status(), await bus.counts()
    assert (status.state, status.step) == (RunState.FINISHED, steps)
    endings = [
        (int(fields[b"id"]), fields[b"outcome"].decode()) for _, fields in await bus.client.xrange(bus.keys.of(AUDIT))
    ]
    assert sorted(group for group, _ in endings) == list(range(status.cursor)), "each admitted prompt ends once"
    assert Counter(outcome for _, outcome in endings) == Counter(counts), "the counters say what the audit says"
    assert counts["trained"] == steps * groups
    assert all(outcome.split(":")[0] in ("trained", "dropped", "dead") for outcome in counts)
    assert [await bus.length(stream) for stream in TRAINING_STREAMS] == [0, 0, 0]


async def _audit_versions(bus: Bus, folder: Path) -> None:
    records = await Ledger(bus).policies()
    assert [record.version for record in records] == list(range(len(records))), "no number is skipped or used twice"
    assert [record.parent for record in records] == [None, *(record.version for record in records[:-1])]
    steps = [record.step for record in records]
    assert steps == sorted(steps)
    assert sorted(set(steps)) == list(range(STEPS + 1))
    promoted = [update.record.version for _, update in await bus.newest(POLICY, PolicyUpdate, 1000)]
    assert len(promoted) == len(set(promoted)), "each version becomes the head once"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "a replayed step is not reported again"
    events = [event.name for _, event in await bus.newest(EVENTS, Event, 10_000)]
    assert "journal replayed" in events
