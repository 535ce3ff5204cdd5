"""A storm of random faults on a real run, which loses nothing and continues to learn.

::

    draw a fault from the seed's deck ──▶ do it ──▶ wait for the next commit (its recovery) ──▶ wait for one more ──▶ again
    at the end: two commits in calm ──▶ stop ──▶ audit ──▶ figures

The seed fixes the faults' order and targets, not their times.
"""

import asyncio
import dataclasses
import logging
import math
import random
import shutil
import signal
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import NO_ENDINGS
from penstock.shared.bus.stores.policy.ledger import ENDED, Ledger
from penstock.shared.bus.stores.policy.policies import PolicyState
from penstock.shared.bus.stores.replicas.run_secret import SECRET
from penstock.shared.shelf.shelf import Limits, Shelf
from penstock.shared.shelf.store import Store
from tests.chaos import episodes
from tests.chaos.audit import Watcher, audit_groups, audit_versions, reward_means
from tests.chaos.run import Run, TcpServer, answers, harmed
from tests.chaos.switches import HOLDERS, SHARED, hang, kill
from tests.conftest import PATIENCE_S, until
from tests.support.fault_proxy import FaultProxy
from tests.support.raw_redis import raw

log = logging.getLogger(__name__)

_FIRST_STEPS, _LAST_STEPS, _LEAST_STEPS = 20, 40, 150
"""The mean reward of a step varies by 0.14, the difference of these means by 0.04; after 150 steps it is about 0.15."""
_LEASE_S = 4.0
"""Longer than a lease."""
_CLAIM_S = 3.0
"""Longer than internal.claim_after_s here."""


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    seed: int
    seconds: float
    faults: dict[str, int]
    recovery_p50_s: float
    recovery_p95_s: float
    slowest: str
    steps: int
    groups_admitted: int
    groups_trained: int
    groups_undone: int
    groups_redone: int
    """Observed repeated deliveries."""
    groups_lost: int
    versions: int
    batches_watched: int
    reward_first: float
    reward_last: float
    groups_unavailable: int = 0
    """Generated again because no copy of a payload was left."""
    episodes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Of agents' records: turns, and kills of replicas with the turns in progress then, and those drawn again."""


class Storm:
    def __init__(
        self,
        run: Run,
        server: TcpServer,
        proxy: FaultProxy,
        bus: Bus,
        watcher: Watcher,
        seed: int,
        *,
        shared: bool = False,
    ) -> None:
        self._run = run
        self._server = server
        self._proxy = proxy
        self._bus = bus
        self._ledger = Ledger(bus)
        self._watcher = watcher
        self._random = random.Random(seed)
        self._joined = 0
        self._faults: dict[str, Callable[[], Awaitable[None]]] = {
            "kill rollout": lambda: self._kill("rollout"),
            "kill reward": lambda: self._kill("reward"),
            "kill trainer": lambda: self._kill("trainer"),
            "kill the leader": self._kill_leader,
            "kill the bus": self._kill_bus,
            "freeze rollout": lambda: self._freeze("rollout", _CLAIM_S),
            "freeze the leader": self._freeze_leader,
            "freeze the bus": self._freeze_bus,
            "cut": self._cut,
            "cut replies": self._cut_replies,
            "silence": self._silence,
            "delay": self._delay,
            "join": self._join,
            "leave": self._leave,
            "pause": self._pause,
            "cordon": self._cordon,
            "roll back": self._roll_back,
        }
        if shared:
            for needing_other_replicas in ("join", "leave", "cordon"):
                del self._faults[needing_other_replicas]
            self._faults["kill in a switch"] = lambda: kill(run, bus, self._random.choice(HOLDERS)[0])
            self._faults["hang with a device"] = lambda: hang(run, bus, *self._random.choice(HOLDERS))
        self.recoveries: list[tuple[str, float]] = []
        """Each fault and the seconds from its beginning (a pause: end) to the next commit."""
        self._since_s = 0.0

    def strike_episodes(self, faults: episodes.EpisodeFaults) -> None:
        """Strike also what plays episodes, and leave out what is the same without."""
        kept = ("kill reward", "kill trainer", "kill the leader", "kill the bus", "cut", "roll back")
        self._faults = {name: self._faults[name] for name in kept} | {
            "kill rollout": lambda: faults.kill_replica(self._one("rollout")),
            "kill episodes": lambda: faults.kill_gateway(self._one("episodes")),
            "kill a host": lambda: faults.kill_host(self._one("episodes")),
            "freeze episodes": lambda: self._freeze("episodes", _CLAIM_S),
        }

    def strike_shelves(self) -> None:
        """Strike also the payloads that replicas keep."""
        self._faults |= {
            "lose a shelf and its replica": lambda: self._lose_shelf(self._one("rollout")),
            "lose every shelf": lambda: self._lose_shelf(""),
        }

    async def _lose_shelf(self, name: str) -> None:
        """Delete the files of one replica, which is killed, or of all."""
        if name:
            self._run.send(name, signal.SIGKILL)
        for shelf in (self._run.folder / "shelf").glob(name or "*"):
            await asyncio.to_thread(shutil.rmtree, shelf, ignore_errors=True)

    async def rage(self, *, seconds: float = math.inf, rounds: float = math.inf) -> None:
        """Strike for ``seconds``, or with every fault ``rounds`` times."""
        end_s, faults = time.monotonic() + seconds, rounds * len(self._faults)
        deck: list[str] = []
        while time.monotonic() < end_s and len(self.recoveries) < faults:
            if not deck:
                deck = sorted(self._faults)
                self._random.shuffle(deck)
            await self._strike(deck.pop())

    async def _strike(self, name: str) -> None:
        self._since_s = time.time()
        log.warning("fault %d: %s", len(self.recoveries) + 1, name)
        try:
            async with asyncio.timeout(2 * PATIENCE_S):
                await self._faults[name]()
                committed_s = await self._committed_after(self._since_s)
                self.recoveries.append((name, committed_s - self._since_s))
                await self._run.more_steps(self._bus, 1)
        except TimeoutError as error:
            status = await self._ledger.status()
            before = ", ".join(fault for fault, _ in self.recoveries[-3:])
            raise AssertionError(
                f"no commit after fault {len(self.recoveries) + 1} ({name}; before it: {before}); {status}\n{self._run.report()}"
            ) from error

    async def _committed_after(self, since_s: float) -> float:
        async def committed() -> bool:
            self._run.check()
            return ((await self._ledger.status()).last_commit_s or 0.0) > since_s

        await until(committed, timeout_s=PATIENCE_S)
        return (await self._ledger.status()).last_commit_s or 0.0

    def _one(self, service: str) -> str:
        return self._random.choice(sorted(self._run.names(service)) or [f"{service}-0"])

    async def _kill(self, service: str) -> None:
        await until(lambda: self._run.send(self._one(service), signal.SIGKILL), timeout_s=PATIENCE_S)

    async def _leader(self) -> str:
        target = ""

        async def led() -> bool:
            nonlocal target
            name = await self._bus.call(lambda: raw(self._bus).hget(self._bus.keys.named("lease"), "replica"))
            target = "" if name is None else name.decode()
            return bool(target)

        await until(led, timeout_s=PATIENCE_S)
        return target

    async def _kill_leader(self) -> None:
        name = await self._leader()
        self._run.send(name, signal.SIGKILL)
        if name == "coordinator-spare":
            await self._run.left(name)
            self._run.join("coordinator", name)

    async def _kill_bus(self) -> None:
        self._server.kill()
        self._server.start()
        await until(lambda: answers(self._server.port), timeout_s=PATIENCE_S)

    async def _freeze(self, service: str, seconds: float) -> None:
        await self._freeze_process(self._one(service), seconds)

    async def _freeze_process(self, name: str, seconds: float) -> None:
        pid = self._run.pid(name)
        self._run.send(name, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        if self._run.pid(name) == pid:
            self._run.send(name, signal.SIGCONT)

    async def _freeze_leader(self) -> None:
        await self._freeze_process(await self._leader(), _LEASE_S)

    async def _freeze_bus(self) -> None:
        self._server.send(signal.SIGSTOP)
        await asyncio.sleep(_LEASE_S)
        self._server.send(signal.SIGCONT)

    async def _cut(self) -> None:
        for _ in range(self._random.randint(1, 5)):
            self._proxy.cut()
            await asyncio.sleep(self._random.uniform(0.05, 0.3))

    async def _cut_replies(self) -> None:
        for _ in range(self._random.randint(1, 5)):
            self._proxy.cut_replies()
            await asyncio.sleep(self._random.uniform(0.05, 0.3))

    async def _silence(self) -> None:
        self._proxy.silence()
        await asyncio.sleep(_LEASE_S)
        self._proxy.end_silence()

    async def _delay(self) -> None:
        self._proxy.delay_s = 0.05
        await asyncio.sleep(2.0)
        self._proxy.delay_s = 0.0

    async def _join(self) -> None:
        service = self._random.choice(("rollout", "reward"))
        self._joined += 1
        self._run.join(service, f"{service}-joined-{self._joined}")

    async def _leave(self) -> None:
        joined = [name for service in ("rollout", "reward") for name in self._run.names(service) if "joined" in name]
        if not joined:
            await self._join()
            return
        name = self._random.choice(joined)
        self._run.send(name, self._random.choice((signal.SIGTERM, signal.SIGKILL)))
        await self._run.left(name)

    async def _pause(self) -> None:
        await self._run.command("/v1/run/pause", {"reason": "the storm"})
        await asyncio.sleep(self._random.uniform(0.5, 2.0))
        await self._run.command("/v1/run/resume")
        self._since_s = time.time()

    async def _cordon(self) -> None:
        name = self._random.choice(("rollout-0", "rollout-1"))
        await self._run.command(f"/v1/services/{name}/cordon")
        await asyncio.sleep(self._random.uniform(0.5, 2.0))
        await self._run.command(f"/v1/services/{name}/uncordon")

    async def _roll_back(self) -> None:
        async def accepted() -> bool:
            self._run.check()
            tip, states = (await self._ledger.status()).tip, await self._ledger.policy_states()
            kept = [
                v for v in await self._ledger.checkpoints() if states.get(v) is not PolicyState.REVOKED and v != tip
            ]
            if not kept:
                return False
            answer = await self._run.ask("POST", f"/v1/policies/{max(kept)}/rollback", {"reason": "the storm"})
            return answer is not None and answer.status_code == 202

        await until(accepted, timeout_s=PATIENCE_S)
        await self._watcher.note_revoked()


async def storm(
    folder: Path,
    seed: int,
    *,
    seconds: float = math.inf,
    rounds: float = math.inf,
    shared: bool = False,
    with_episodes: bool = False,
    with_shelves: bool = False,
    forked: bool = False,
) -> Figures:
    """Return the figures of a storm.

    Args:
        seconds: its length.
        rounds: how often each fault strikes.
        shared: trainer and replica use one device in turn.
        with_episodes: an agent plays episodes; for ``seconds``, some of its rows are hostile.
        with_shelves: all payloads are on shelves, of which some, and all at once, are lost.
        forked: processes by ``tests/support/forge.py``, so that recoveries take less time than a user's.
    """
    flags, config = (SHARED if shared else {}), "config/arithmetic.toml"
    if with_episodes:
        flags, config = episodes.flags(folder, hostile=seconds < math.inf), episodes.CONFIG
    if with_shelves:
        flags = {**flags, "bus.shelve_above_bytes": 1}
    async with harmed(folder, seed, flags, config=config, forked=forked) as (run, server, proxy, bus):
        watcher = Watcher(bus)
        async with watcher.watching():
            await run.more_steps(bus, 5)
            if with_shelves:
                secret = await bus.get(SECRET) or b""
                bus.shelf = Shelf(bus, Store(folder / "none", 1), "watcher", lambda: secret, Limits(0, 1, 2.0))
            run.join("coordinator", "coordinator-spare")
            raging = Storm(run, server, proxy, bus, watcher, seed, shared=shared)
            faults = episodes.EpisodeFaults(run, bus, folder) if with_episodes else None
            if faults:
                raging.strike_episodes(faults)
            if with_shelves:
                raging.strike_shelves()
            started_s = time.monotonic()
            await raging.rage(seconds=seconds, rounds=rounds)
            raged_s = time.monotonic() - started_s
            await run.more_steps(bus, 2)
            while not with_episodes and (await Ledger(bus).status()).step < _LEAST_STEPS:  # a busy machine makes few
                await run.more_steps(bus, 5)
            await run.stop()
        assert (await Ledger(bus).status()).state in ENDED
        figures = await _figures(bus, run, raging, watcher, seed, raged_s)
        return dataclasses.replace(figures, episodes=await faults.audit() if faults else {})


async def _figures(bus: Bus, run: Run, raging: Storm, watcher: Watcher, seed: int, seconds: float) -> Figures:
    counts = await audit_groups(bus)
    await audit_versions(bus)
    await watcher.audit()
    status, records, rewards = await Ledger(bus).status(), await Ledger(bus).policies(), reward_means(run.folder)
    recoveries = sorted(raging.recoveries, key=lambda recovery: recovery[1])
    times = [found_s for _, found_s in recoveries]
    return Figures(
        seed=seed,
        seconds=round(seconds, 1),
        faults=dict(sorted(Counter(name for name, _ in recoveries).items())),
        recovery_p50_s=round(statistics.median(times), 2),
        recovery_p95_s=round(times[min(len(times) - 1, int(0.95 * len(times)))], 2),
        slowest=f"{recoveries[-1][0]}: {recoveries[-1][1]:.1f} s",
        steps=status.step,
        groups_admitted=status.cursor,
        groups_trained=counts.get("trained", 0),
        groups_undone=counts.get("undone", 0),
        groups_redone=watcher.redone,
        groups_lost=status.cursor - sum(count for name, count in counts.items() if name not in NO_ENDINGS),
        versions=len(records),
        batches_watched=len(watcher.batches),
        reward_first=round(statistics.mean(rewards[:_FIRST_STEPS]), 4),
        reward_last=round(statistics.mean(rewards[-_LAST_STEPS:]), 4),
        groups_unavailable=counts.get("unavailable", 0),
    )
