"""A leader that is killed or frozen in the middle of a rollback, a pause, an evaluation, a release, or anything.

::

    two coordinators, the tracking service (processes) ── a Valkey of their own ── the model-free trainer and replicas
    steps ──▶ command ──▶ the leader is killed, or stopped for 3 to 12 s ──▶ steps under the other ──▶ stop ──▶ audit

The seed chooses the fault's kind, place and times. Every step must be one line of every record.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from penstock.services.coordinator.records.curves import Curves
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus, Delivery
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Event, Experience, StepReport
from penstock.shared.bus.stores.policy.evaluations import evaluated as versions_evaluated
from penstock.shared.bus.stores.policy.evaluations import under_way
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.policy.rollback import OVER, current_rollback
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat, beat_once
from penstock.shared.errors import Fenced
from penstock.shared.settings import dump
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import TcpServer, answers
from tests.support import forge, trackers
from tests.support.coordinator_players import record, replicas, report, settings
from tests.support.raw_redis import raw
from tests.support.waits import PATIENCE_S, until

PLACES = ("rollback", "pause", "evaluation", "release", "anything")
NAMES = ("coordinator-a", "coordinator-b")
_STEPS, _PROBLEMS, _CHECKPOINT_EVERY = 8, 40, 3


@dataclasses.dataclass(frozen=True, slots=True)
class Strike:
    seed: int
    place: str
    fault: str
    """killed, or frozen and for how long."""
    steps: int
    lines: int
    """Of metrics.jsonl: more than steps after a rollback."""
    terms: int


class Players:
    """The model-free trainer, which follows rollbacks, and a replica's heartbeats."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._ledger = Ledger(bus)
        self._epoch = 0

    async def train(self) -> None:
        while True:
            try:
                await self._enter()
                while True:
                    await self._step()
            except Fenced:
                await asyncio.sleep(0.05)

    async def beat(self) -> None:
        while True:
            status = await self._ledger.status()
            now_s = time.time()
            beat = Heartbeat(
                "rollout", "rollout-0", "working", status.head, "here", os.getpid(), "", now_s, now_s, 0, "", {}
            )
            await beat_once(self._bus, beat, 5.0)
            await asyncio.sleep(0.1)

    async def _enter(self) -> None:
        """Take an epoch; publish the first version, or the one that a rollback waits for."""
        self._epoch = await self._ledger.take_epoch()
        status = await self._ledger.status()
        if status.newest_version is None:
            await self._ledger.commit(self._epoch, record(0, None, 0), [], None)
        elif status.tip != status.newest_version:
            await asyncio.sleep(0.3)  # a load, in which a leader may be struck
            again = record(status.newest_version + 1, status.tip, status.step)
            await self._ledger.commit(self._epoch, again, [], None)

    async def _step(self) -> None:
        batch = [delivery async for delivery in self._bus.own(streams.EXPERIENCE, Experience, "trainer")]
        while len(batch) < 2:
            batch += await self._bus.read(streams.EXPERIENCE, Experience, "trainer", 2 - len(batch), block_s=0.05)
            batch = await self._unrevoked(batch)
            if (await self._ledger.status()).trainer_epoch != self._epoch:
                raise Fenced("a rollback")
        status = await self._ledger.status()
        assert status.newest_version is not None
        step, version = status.step + 1, status.newest_version + 1
        made = dataclasses.replace(report(step, version), finished_at_s=time.time())
        await self._ledger.commit(self._epoch, record(version, status.tip, step), batch[:2], made)
        if step % _CHECKPOINT_EVERY == 0:
            await self._ledger.set_checkpoint(made.version, f"/checkpoints/{version}")
        await asyncio.sleep(0.05)

    async def _unrevoked(self, batch: list[Delivery[Experience]]) -> list[Delivery[Experience]]:
        revoked, kept = await self._ledger.revoked(), []
        for delivery in batch:
            if delivery.message().group.prompt.min_version in revoked:
                await self._bus.drop(delivery, "fenced")
            else:
                kept.append(delivery)
        return kept


class Coordinators:
    """Two coordinators and the tracking service, as processes."""

    def __init__(self, folder: Path, run: Path, bus: Bus) -> None:
        self._folder = folder
        self._run = run
        self._bus = bus
        self.processes: dict[str, forge.Started] = {}

    def start(self, name: str, service: str = "coordinator") -> None:
        words = ["--config", self._folder / "run.toml", "--replica", name]
        with (self._folder / f"{name}.log").open("ab") as log:
            self.processes[name] = forge.start(f"penstock.services.{service}", words, log)

    async def leader(self) -> str:
        name = ""

        async def leads() -> bool:
            nonlocal name
            holder = await self._bus.call(lambda: raw(self._bus).hget(self._bus.keys.named("lease"), "replica"))
            name = "" if holder is None else holder.decode()
            return bool(name)

        await until(leads)
        return name

    async def command(self, path: str, **body: Any) -> None:
        """Repeat it until the leader, whoever that is, has answered."""

        async def answered() -> bool:
            with contextlib.suppress(httpx.HTTPError, OSError, ValueError, KeyError):
                url = json.loads((self._run / "coordinator.json").read_text())["url"]
                token = (self._run / "token").read_text().strip() if (self._run / "token").exists() else ""
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S) as client:
                    answer = await client.post(path, json=body)
                return answer.is_success or answer.status_code == 409
            return False

        await until(answered)

    async def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
                process.terminate()
        for process in self.processes.values():
            await asyncio.to_thread(process.wait, PATIENCE_S)


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Bus, str]]:
    (folder / "valkey").mkdir(parents=True)
    server = TcpServer(folder / "valkey")
    server.start()
    try:
        await until(lambda: answers(server.port))
        bus = await Bus.connect(server.url, "test", wait_s=PATIENCE_S)
        yield bus, server.url
        await bus.close()
    finally:
        server.kill()


async def strike(folder: Path, seed: int) -> Strike:
    """Run once. Raises AssertionError: something was lost, or is twice."""
    chance = random.Random(seed)
    place = PLACES[seed % len(PLACES)]
    async with served(folder) as (bus, url):
        run = settings(
            folder, steps=100_000, heldout=_PROBLEMS, problems=200, tracking={"sinks": ["tensorboard"]},
            bus={"url": url, "drain_s": 1.0}, evaluation={"problems": _PROBLEMS, "every_steps": 10},
            coordinator={"sample_every_steps": 2},
        )  # fmt: skip
        run.run_folder.mkdir(parents=True)
        dump(run, folder / "run.toml")
        coordinators, players = Coordinators(folder, run.run_folder, bus), Players(bus)
        coordinators.start(NAMES[0])
        coordinators.start(NAMES[1])
        coordinators.start("tracking-0", "tracking")
        async with replicas(bus), asyncio.TaskGroup() as tasks:
            playing = [tasks.create_task(players.train()), tasks.create_task(players.beat())]
            try:
                await _steps_more(bus, _STEPS)
                fault = await _strike(bus, coordinators, place, chance)
                await _steps_more(bus, 12)
                await coordinators.command("/v1/run/stop")
                await until(lambda: _is_closed(bus))
                for task in playing:
                    task.cancel()
            finally:
                await coordinators.close()
        return Strike(seed, place, fault, *await _audit(bus, run.run_folder))


async def _strike(bus: Bus, coordinators: Coordinators, place: str, chance: random.Random) -> str:
    """Bring the leader to ``place``, and kill or freeze it there; return what was done."""
    leader = await coordinators.leader()
    process = coordinators.processes[leader]
    await _come_to(bus, coordinators, place)
    await asyncio.sleep(chance.uniform(0.0, 0.3))
    if chance.random() < 0.4:
        process.kill()
        await asyncio.to_thread(process.wait, PATIENCE_S)
        coordinators.start(leader)
        fault = "killed"
    else:
        seconds = chance.uniform(3.0, 12.0)
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(process.pid, signal.SIGCONT)
        fault = f"frozen {seconds:.1f} s"
    if place == "rollback":
        await until(lambda: _no_rollback(bus))
    if place == "pause":
        await coordinators.command("/v1/run/resume")
    return fault


async def _come_to(bus: Bus, coordinators: Coordinators, place: str) -> None:
    ledger = Ledger(bus)
    tip = (await ledger.status()).tip
    kept = max(version for version in await ledger.checkpoints() if version != tip)
    if place == "rollback":
        await coordinators.command(f"/v1/policies/{kept}/rollback", reason="a test")
    elif place == "pause":
        await coordinators.command("/v1/run/pause", mode="drain")
    elif place == "release":
        await coordinators.command(f"/v1/policies/{kept}/release")
    elif place == "evaluation":
        await until(lambda: _evaluates(bus))


async def _evaluates(bus: Bus) -> bool:
    return await under_way(bus) is not None


async def _no_rollback(bus: Bus) -> bool:
    rollback = await current_rollback(bus)
    return rollback is None or rollback.stage in OVER


async def _is_closed(bus: Bus) -> bool:
    return (await Ledger(bus).status()).closed


async def _steps_more(bus: Bus, steps: int) -> None:
    """Wait for ``steps`` more committed versions of a running run."""
    first = (await Ledger(bus).status()).newest_version or 0

    async def made() -> bool:
        status = await Ledger(bus).status()
        return status.state is RunState.RUNNING and (status.newest_version or 0) >= first + steps

    await until(made)


async def _audit(bus: Bus, folder: Path) -> tuple[int, int, int]:
    """Check groups, versions and every record against the bus; return steps, lines and terms."""
    await audit_groups(bus)
    await audit_versions(bus)
    status = await Ledger(bus).status()
    steps = await _on_bus(bus, streams.STEPS)
    lines = _lines(folder / "metrics.jsonl")
    assert [line["entry"] for line in lines] == [entry for entry, _ in steps], "each step is one line, in order"
    events = [line["entry"] for line in _lines(folder / "events.jsonl")]
    on_bus = [entry for entry, data in await _on_bus(bus, streams.EVENTS) if wire.decode(data, Event)]
    assert events == on_bus[: len(events)], "each event, but those after the end"
    assert len(on_bus) - len(events) <= 3
    evaluated = Counter((line["version"], line["set"]) for line in _lines(folder / "evaluations.jsonl"))
    assert set(evaluated.values()) == {1}
    assert {version for version, _ in evaluated} == set(await versions_evaluated(bus))
    sampled = [_place(line["entry"]) for line in _lines(folder / "rollouts.jsonl")]
    assert sampled == sorted(set(sampled))
    curves = Curves(folder)
    while not curves.catch_up():
        pass
    drawn = [line["step"] for line in curves.lines()]
    assert drawn == list(range(1, status.step + 1)), "page and report have each step of the branch once"
    assert json.loads((folder / "summary.json").read_text())["steps"] == status.step
    segments = [segment.name for segment in (folder / "tensorboard").iterdir()]
    points = Counter(step for each in segments for step, _ in trackers.tensorboard(folder, each, "train/reward"))
    assert points == Counter(wire.decode(data, StepReport).step for _, data in steps), "the tracker has each once"
    return status.step, len(lines), int(await raw(bus).hget(bus.keys.named("run"), "leader_term"))


async def _on_bus(bus: Bus, stream: streams.Stream) -> list[tuple[str, bytes]]:
    return [(entry, fields[b"data"]) for entry, fields in await bus.xrange(stream)]


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def _place(entry: str) -> tuple[int, int]:
    at_ms, _, number = entry.partition("-")
    return int(at_ms), int(number)
