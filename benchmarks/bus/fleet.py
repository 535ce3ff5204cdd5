"""The bus under a thousand replicas: server time of a sample, of idling, of a large commit; replicas killed at once.

Replicas are scripted (:mod:`benchmarks.bus.fleet_players`), tasks of a few processes; bus, workers, ledger and server are
real. Times are the server's own processor seconds, of its main thread, so that slow players do not count.

    python -m benchmarks.bus.fleet scale --replicas 2 1000
    python -m benchmarks.bus.fleet idle --replicas 20
    python -m benchmarks.bus.fleet commit --megabytes 805
    python -m benchmarks.bus.fleet kills --replicas 1000 --killed 100 --held 64
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from benchmarks.bus.fleet_players import SAMPLES
from penstock.shared.bus import embedded
from penstock.shared.bus.bus import SWEPT, Bus, Delivery
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, Prompt, RolloutGroup
from penstock.shared.bus.stores.policy.ledger import TRAINED, Ledger, RunState
from penstock.shared.bus.streams import EXPERIENCE, PROMPTS, ROLLOUTS
from tests.support import builders
from tests.support.coordinator_players import record, report
from tests.support.raw_redis import raw

_GROUPS_PER_STEP, _STEPS_PER_CHECKPOINT = 64, 4
_CLAIM_AFTER_S = 3600.0
"""Of replicas whose seconds are played, so that none falls silent."""
_TOKENS_PER_S = 50.0
"""Of a sample, where tokens are counted."""


class Rest:
    """Everything but the replicas: admits, scores, commits and trims, without a model."""

    def __init__(self, bus: Bus, slots: int) -> None:
        self._bus, self._ledger, self.slots = bus, Ledger(bus), slots
        self._epoch = self._step = 0
        self._batch = list[Delivery[Experience]]()

    async def start(self) -> None:
        await self._ledger.create()
        await self._ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
        self._epoch = await self._ledger.take_epoch()
        await self._ledger.commit(self._epoch, record(0, None, 0), [], None)

    async def run(self) -> None:
        while True:
            await self.admit()
            await self.pass_on()
            await asyncio.sleep(0.5)

    async def admit(self) -> None:
        """Admit groups into free slots."""
        while (run := await self._ledger.admission_state()).in_flight < self.slots and run.newest_version is not None:
            count = min(256, self.slots - run.in_flight)
            groups = [builders.prompt(run.cursor + number, samples=SAMPLES) for number in range(count)]
            await self._ledger.admit(groups, self.slots, _GROUPS_PER_STEP, 1 << 30, run.newest_version)

    async def pass_on(self) -> None:
        """Score and train what is there; a last step may be smaller."""
        payload = wire.encode(builders.experience(0))
        while scored := await self._bus.read(ROLLOUTS, RolloutGroup, "reward-0", 64, None):
            for delivery in scored:
                await self._bus.hand_over(delivery, EXPERIENCE, payload)
        while taken := await self._bus.read(
            EXPERIENCE, Experience, "trainer", _GROUPS_PER_STEP - len(self._batch), None
        ):
            self._batch += taken
            if len(self._batch) == _GROUPS_PER_STEP:
                await self._commit()
        if self._batch and not self.slots:
            await self._commit()

    async def _commit(self) -> None:
        self._step += 1
        made = record(self._step, self._step - 1, self._step)
        await self._ledger.commit(self._epoch, made, self._batch, report(self._step, self._step))
        self._batch = []
        if self._step % _STEPS_PER_CHECKPOINT == 0:
            await self._ledger.trim_journal(await self._ledger.last_journal_entry())


@dataclasses.dataclass(frozen=True)
class Look:
    """What the server had done until a moment."""

    at_s: float
    busy_s: float
    calls: Counter[str]
    """By command."""

    @classmethod
    async def at(cls, bus: Bus) -> "Look":
        cpu, stats = await raw(bus).info("cpu"), await raw(bus).info("commandstats")
        busy_s = cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"]
        calls = {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}
        return cls(time.monotonic(), busy_s, Counter(calls))


@contextlib.contextmanager
def serving() -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory(prefix="penstock-fleet-") as folder,
        embedded.serving(Path(folder) / "valkey") as url,
    ):
        yield url


class Players:
    """Processes of replicas; their output is in ``folder``."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def add(self, first: int, replicas: int, *flags: str) -> None:
        words = [sys.executable, "-m", "benchmarks.bus.fleet_players", "--url", self._url]
        words += ["--first", str(first), "--replicas", str(replicas), *flags]
        with self._output(len(self.processes)).open("wb") as output:
            self.processes.append(subprocess.Popen(words, stdout=output))

    def _output(self, number: int) -> Path:
        return self._folder / f"players-{number}"

    async def all_play(self) -> None:
        for number in range(len(self.processes)):
            while b"playing\n" not in self._output(number).read_bytes():
                await asyncio.sleep(0.5)

    def lines(self) -> Iterator[tuple[str, float, str, int, list[int]]]:
        """Yield what the replicas noted: begin or end, Unix seconds, replica, group, samples."""
        for number in range(len(self.processes)):
            for line in self._output(number).read_text().splitlines():
                if len(words := line.split()) == 5:
                    yield words[0], float(words[1]), words[2], int(words[3]), list(map(int, words[4].split(",")))

    def tell(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextlib.asynccontextmanager
async def playing(url: str) -> AsyncIterator[tuple[Bus, Players]]:
    bus = await Bus.connect(url, "fleet", wait_s=600.0, audit_entries=0)
    with tempfile.TemporaryDirectory(prefix="penstock-fleet-") as folder:
        players = Players(url, Path(folder))
        try:
            yield bus, players
        finally:
            players.end()
            await bus.close()


class Hands:
    """A replica that is full, by the second: it asks its worker's questions, and as many of its samples end as should."""

    def __init__(self, bus: Bus, name: str, room: int, seconds: float) -> None:
        self._bus, self._name, self._room = bus, name, room
        self._due, self._ends_s = random.Random(name).random(), seconds / room
        self._held: deque[Delivery[Prompt]] = deque()

    async def fill(self) -> int:
        """Take what there is room for; return how many samples it holds."""
        self._held += await self._bus.read(PROMPTS, Prompt, self._name, self._room - len(self._held), None)
        await self._bus.renew(PROMPTS, self._name, _CLAIM_AFTER_S)
        return len(self._held)

    async def live(self, second: int) -> int:
        """Live a second; return how many samples ended."""
        before = self._due
        self._due += 1 / self._ends_s
        for _ in range(int(self._due) - int(before)):
            delivery = self._held.popleft()
            part = builders.part(dataclasses.replace(delivery, part="all").message())
            assert await self._bus.hand_over(delivery, ROLLOUTS, dataclasses.replace(part, places=()))
            self._held += await self._bus.read(PROMPTS, Prompt, self._name, 1, None)
        assert await self._bus.reclaim(PROMPTS, Prompt, self._name, _CLAIM_AFTER_S, 8, suspects=8) == []
        if (second + int(self._name.partition("-")[2])) % 10 == 0:
            await self._bus.renew(PROMPTS, self._name, _CLAIM_AFTER_S)
        return int(self._due) - int(before)


async def scale(url: str, replicas: int, given: argparse.Namespace) -> dict[str, float | int]:
    """Return the server's time per sample while all replicas are full.

    Their seconds are played one after another, as fast as this machine can, so nothing expires by the clock.
    """
    bus = await Bus.connect(url, "fleet", wait_s=600.0, audit_entries=0)
    rest = Rest(bus, replicas * given.held // SAMPLES + 4 * _GROUPS_PER_STEP)
    await rest.start()
    await rest.admit()
    hands = [Hands(bus, f"rollout-{number}", given.held, given.seconds) for number in range(replicas)]
    pending = sum([await each.fill() for each in hands])
    before, samples = await Look.at(bus), 0
    for second in range(given.played_s if replicas > 100 else given.played_s * 10):
        swept = bus.keys.of(SWEPT.of(PROMPTS.name))
        await (raw(bus).delete(swept) if second % 2 else raw(bus).set(swept, "another"))
        for first in range(0, replicas, 16):
            samples += sum(await asyncio.gather(*(each.live(second) for each in hands[first : first + 16])))
        await rest.pass_on()
    after = await Look.at(bus)
    assert (await bus.depth(PROMPTS)).pending >= pending - samples
    await bus.close()
    busy_s = after.busy_s - before.busy_s
    return {
        "replicas": replicas,
        "pending": pending,
        "samples": samples,
        "commands_per_sample": round((after.calls - before.calls).total() / samples, 2),
        "server_us_per_sample": round(busy_s / samples * 1e6, 1),
    }


async def idle(url: str, replicas: int, given: argparse.Namespace) -> dict[str, Any]:
    """Return the server's share of a core under rollout services without work.

    ``core_of_1000``: of a thousand that send a heartbeat a second, as one does that is not slowed by its own machine.
    """
    async with playing(url) as (bus, players):
        await Rest(bus, 0).start()
        for first in range(0, replicas, 250):
            players.add(first, min(250, replicas - first), "--idle")
        await players.all_play()
        await asyncio.sleep(5.0)
        before = await Look.at(bus)
        await asyncio.sleep(given.window_s)
        after = await Look.at(bus)
    seconds, calls = after.at_s - before.at_s, after.calls - before.calls
    return {
        "replicas": replicas,
        "core": round((after.busy_s - before.busy_s) / seconds, 4),
        "core_of_1000": round((after.busy_s - before.busy_s) / calls["sadd"] * 1000, 3),
        "heartbeats_per_replica_s": round(calls["sadd"] / seconds / replicas, 2),
        "commands_per_replica_s": round(calls.total() / seconds / replicas, 2),
        "calls_per_replica_s": {name: round(n / seconds / replicas, 2) for name, n in calls.most_common(8)},
    }


async def commit(url: str, given: argparse.Namespace) -> dict[str, float | int]:
    """Return how long a step's commit and the checkpoint after it keep the server busy."""
    bus = await Bus.connect(url, "fleet", wait_s=600.0, audit_entries=0)
    await Rest(bus, 0).start()
    ledger, payload = Ledger(bus), os.urandom(given.megabytes * 1_000_000 // _GROUPS_PER_STEP)
    epoch = await ledger.take_epoch()
    for number in range(_GROUPS_PER_STEP):
        await bus.publish(ROLLOUTS, builders.group(number), str(number))
        (delivery,) = await bus.read(ROLLOUTS, RolloutGroup, "reward-0", 1, 1.0)
        await bus.hand_over(delivery, EXPERIENCE, payload)
    batch = [
        delivery for _ in range(_GROUPS_PER_STEP) for delivery in await bus.read(EXPERIENCE, Experience, "t", 1, 1.0)
    ]
    assert all(delivery.data == payload for delivery in batch)
    begun = (await Look.at(bus)).busy_s
    await ledger.commit(epoch, record(1, 0, 1), batch, report(1, 1))
    committed = (await Look.at(bus)).busy_s
    assert [entry.data == payload for entry in await ledger.journal("")] == [True] * _GROUPS_PER_STEP
    read = (await Look.at(bus)).busy_s
    await ledger.trim_journal(await ledger.last_journal_entry())
    trimmed = (await Look.at(bus)).busy_s
    used, _ = await bus.memory_bytes()
    await bus.close()
    return {
        "megabytes": given.megabytes,
        "commit_ms": round((committed - begun) * 1e3, 2),
        "trim_ms": round((trimmed - read) * 1e3, 2),
        "megabytes_left": round(used / 1e6, 1),
    }


async def kills(url: str, given: argparse.Namespace) -> dict[str, float | int]:
    """Kill replicas at once; return what was decoded again, how soon, and whether each group was trained once.

    Replicas have a quarter more room than they hold on average, at least a group's.
    """
    replicas, room = given.replicas[0], max(given.held * 5 // 4 // SAMPLES, given.held // SAMPLES + 1) * SAMPLES
    flags = ["--room", str(room), "--seconds", str(given.seconds), "--claim-after-s", str(given.claim_after_s)]
    async with playing(url) as (bus, players), asyncio.TaskGroup() as tasks:
        rest = Rest(bus, replicas * given.held // SAMPLES)
        await rest.start()
        players.add(0, given.killed, *flags)
        running = tasks.create_task(rest.run())
        for first in range(given.killed, replicas, 300):
            players.add(first, min(300, replicas - first), *flags)
        await players.all_play()
        while (await bus.depth(PROMPTS)).pending < 0.95 * rest.slots * SAMPLES:
            await asyncio.sleep(1.0)
        await asyncio.sleep(2 * given.claim_after_s / 3)
        killed_s = time.time()
        players.processes[0].kill()
        names = {f"rollout-{number}" for number in range(given.killed)}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(given.claim_after_s + given.window_s):
                while not Played(players, names).is_recovered:
                    await asyncio.sleep(1.0)
        rest.slots = 0
        players.tell(signal.SIGUSR1)
        while await Ledger(bus).in_flight():
            await asyncio.sleep(1.0)
        running.cancel()
        await asyncio.sleep(1.0)
        return {
            **{"replicas": replicas, "killed": given.killed, "claim_after_s": given.claim_after_s},
            **_audit(Played(players, names), names, killed_s),
            **await _counted(bus),
        }


class Played:
    """What the replicas noted so far, by group and sample."""

    def __init__(self, players: Players, killed: set[str]) -> None:
        self.begins: dict[tuple[int, int], list[tuple[float, str]]] = defaultdict(list)
        self.ends: dict[tuple[int, int, str], float] = {}
        for event, at_s, replica, group, places in players.lines():
            for place in places:
                if event == "begin":
                    self.begins[group, place].append((at_s, replica))
                else:
                    self.ends[group, place, replica] = at_s
        self.held = {
            sample: begun
            for sample, begun in self.begins.items()
            if begun[0][1] in killed and (*sample, begun[0][1]) not in self.ends
        }
        """Begins of the samples that the killed ones held."""

    @property
    def is_recovered(self) -> bool:
        return all(len(begun) > 1 for begun in self.held.values())


def _audit(played: Played, killed: set[str], killed_s: float) -> dict[str, float | int]:
    begins, ends, held = played.begins, played.ends, played.held
    waits = sorted(begun[1][0] - killed_s if len(begun) > 1 else float("inf") for begun in held.values())
    twice = [(sample, begun) for sample, begun in begins.items() if len(begun) > 1]
    of_living = sum(begun[0][1] not in killed for _, begun in twice)
    decoded = sum(
        min(ends.get((*sample, name), killed_s), killed_s) - at_s
        for sample, begun in twice
        for at_s, name in begun[:-1]
    )
    flight = sum(killed_s - begun[0][0] for begun in held.values())
    return {
        "samples_held_by_killed": len(held),
        "samples_begun_twice_by_living": of_living,
        "tokens_in_flight": round(flight * _TOKENS_PER_S),
        "tokens_decoded_twice": round(decoded * _TOKENS_PER_S),
        "recovery_s_median": round(statistics.median(waits), 2),
        "recovery_s_p95": round(waits[int(0.95 * len(waits))], 2),
        "recovery_s_longest": round(waits[-1], 2),
    }


async def _counted(bus: Bus) -> dict[str, int]:
    status, counts = await Ledger(bus).account()
    trained = int(await raw(bus).bitcount(bus.keys.of(TRAINED)))
    assert counts == Counter(trained=status.cursor), (counts, status.cursor)
    assert trained == status.cursor, (trained, status.cursor)
    return {"admitted": status.cursor, "trained_once": trained, "other_endings": 0}


def main() -> None:
    """Print one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("scale", "idle", "commit", "kills"))
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 1000])
    parser.add_argument("--held", type=int, default=256, help="samples of a replica")
    parser.add_argument("--seconds", type=float, default=300.0, help="mean time of a sample")
    parser.add_argument("--window-s", type=float, default=60.0)
    parser.add_argument("--played-s", type=int, default=20, help="seconds of each replica; ten times as many of few")
    parser.add_argument("--killed", type=int, default=100)
    parser.add_argument("--claim-after-s", type=float, default=30.0)
    parser.add_argument("--megabytes", type=int, default=805)
    given = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    if given.part in ("scale", "idle"):
        for replicas in given.replicas:
            with serving() as url:
                rounds.append(asyncio.run((scale if given.part == "scale" else idle)(url, replicas, given)))
            print(rounds[-1], file=sys.stderr, flush=True)
    else:
        with serving() as url:
            rounds.append(asyncio.run((commit if given.part == "commit" else kills)(url, given)))
    result: dict[str, Any] = {
        "benchmark": f"fleet {given.part}",
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    print(json.dumps({**result, "load": os.getloadavg()[0], "rounds": rounds}))


if __name__ == "__main__":
    main()
