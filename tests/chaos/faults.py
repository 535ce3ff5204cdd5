"""A run that ``test_faults`` harms; faults mend themselves after their body.

::

    Valkey ◀── penstock up: coordinator-0, rollout-0, reward-0, trainer-0, Prometheus with the shipped rules, hurried
                 │   └── checkpoints ──▶ object storage (moto's server, in this process)
                 ├── rollout-odd     by hand: a policy that computes something else from the same weights
                 ├── reward-tight    by hand: a second scorer, a reward model that needs much memory
                 ├── reward-lenient  by hand: a second scorer, which accepts wrong numbers
                 ├── coordinator-idle, rollout-idle: another run on this bus, which has no trainer
                 └── executor-isolated, executor-unsafe: scraped only
The run's folder is a tmpfs, where mounting is allowed.
"""

import asyncio
import contextlib
import functools
import json
import resource
import shutil
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.replicas.cordon import Word, tell_replica
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat, heartbeats
from penstock.shared.bus.streams import EXPERIENCE
from penstock.shared.files.durable import write_whole
from tests.chaos.alarms import Alarms
from tests.chaos.run import ROOT, RUN_ID, Run, TcpServer, answers, is_in, running
from tests.chaos.spoiled_scorer import VARIABLE
from tests.conftest import PATIENCE_S, free_port, until
from tests.support import executor_process, reward_models
from tests.support.disks import Disk, small_disk
from tests.support.object_storage import Storage
from tests.support.raw_redis import raw

SCORER = f'{{kind = "python", function = "tests.chaos.spoiled_scorer:score", environment = ["{VARIABLE}"]}}'
MAX_LAG, LONGER_LAG, STEPS = 1, 6, 4
STILL, SLOW, RUINOUS = 1e-12, 1e-6, 0.02
"""Learning rates: weights stay unchanged; answers keep differing; one step ruins the policy."""
GROUPS, SAMPLES = 8, 64
FLAGS = {
    "reward.scorers": f"[{SCORER}]",
    "reward.expression": "python",
    "algorithm.advantage": "dr_grpo",  # huge rewards give huge gradients
    "algorithm.max_lag": MAX_LAG,
    "rollout.replicas": 1,
    "internal.max_attempts": 2,
    "bus.drain_s": 60,  # how long the end of the run waits for a frozen trainer
    "evaluation.problems": 4,
    "weights.deadline_s": 1,
    "internal.probe_every_versions": 2,
    "trainer.learning_rate": SLOW,
    "trainer.checkpoint_every_steps": 10,
    "guards.pause": '["no_signal", "kl", "entropy", "lag", "unscored"]',
    # lag ends at the next step; not probe: a replica is another model
    "guards.steps": STEPS,
    "guards.limits.entropy": 1e-3,
    "guards.limits.lag": 0.35,  # a killed replica makes fewer stale groups
    "guards.limits.starving": 0.6,
    "guards.limits.unscored": 4,
    "guards.limits.stalled": 3,
    "internal.starving_window_s": 3,
}
LEAST_MINUTE_S, STEPS_A_MINUTE = 0.6, 2
TIMES = {
    "PenstockServiceRestarting": 6,
    "PenstockWeightPullFailures": 6,
    "PenstockTrainerStarving": 2,
    "PenstockLagGrowing": 3,
    "run:penstock_trainer_lag_steps:mean5m": 3,
    "PenstockCheckpointNotStored": 0.1,
    "PenstockRewardDependsOnLeniency": 0.2,
    "PenstockRunHoldsGpus": 0.1,
    "PenstockRunNotStarted": 0.1,
}
"""Longer minutes for process starts, pull deadlines (1 s; 10 s for a file) or slow steps; shorter ones where half an
hour or an hour need hold no more than an upload, or a few scrapes.
"""
SLOW_STEP_S, SLOWER = 1.2, 5
"""Minimum of the slow scorer's step, also relative to a normal one."""
FILE_BYTES = 1024**2
"""Less than a checkpoint's files, more than the trainer's log."""
MODEL_WIDTH, MODEL_ROOM_BYTES = 1 << 20, 320 * 1024**2
"""Three numbers per place of a token: 8 samples of at least 6 tokens need 600 MB, too much; one of at most 10 needs
126 MB, which fits beside first-time allocations.
"""
ISOLATED, UNSAFE, ODD, TIGHT = "executor-isolated", "executor-unsafe", "rollout-odd", "reward-tight"
LENIENT, IDLE_RUN = "reward-lenient", "idle"
IDLE = {"coordinator": "coordinator-idle", "rollout": "rollout-idle"}
LENIENT_SCORER = '{kind = "answer", mode = "numeric", extract = "whole", lenient = ["whole"], tolerance = 1.0}'
DISK_KIB = 512 * 1024
MEASURED_STEPS, STEADY_STEPS = 10, 25
"""Steps to measure one; more than the guard `throughput` examines (2 + 8)."""


class Faults:
    def __init__(
        self,
        run: Run,
        bus: Bus,
        server: TcpServer,
        storage: Storage,
        disk: Disk,
        scorer: Path,
        isolated: executor_process.Running,
        around: contextlib.ExitStack,
    ) -> None:
        self.run, self.bus, self.server, self.storage, self.disk = run, bus, server, storage, disk
        self.isolated, self.around = isolated, around
        self.slow = ""
        self.alarms = Alarms(run, bus)
        self.raised = self.alarms.raised
        self._scorer = scorer
        self._pinned = PolicyVersion(0)
        self.ports = {name: free_port() for name in (ODD, TIGHT, LENIENT, *IDLE.values())}

    @contextlib.contextmanager
    def scorer(self, does: str) -> Iterator[None]:
        write_whole(self._scorer, does)
        try:
            yield
        finally:
            write_whole(self._scorer, "")

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        processes = self.tree(name)
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    @contextlib.asynccontextmanager
    async def frozen_trainer(self) -> AsyncIterator[None]:
        """Freeze the trainer while its replica has the newest weights, so that it generates."""
        while True:
            with self.frozen("trainer-0"):
                if await self._is_served():
                    yield
                    return
            # Let the replica finish the pull that the freeze broke off: the next freeze would find it behind, and
            # the throughput guard would take frozen seconds for normal.
            await self.train(STEADY_STEPS)

    async def _is_served(self) -> bool:
        settled_s, newest = time.time() + 1, (await Ledger(self.bus).status()).newest_version
        fresh: list[Heartbeat] = []

        async def told() -> bool:
            beats = await heartbeats(self.bus)
            fresh[:] = [beat for beat in beats if beat.replica == "rollout-0" and beat.seen_at_s > settled_s]
            return bool(fresh)

        await self.run.until(told)
        return fresh[0].version == newest

    @contextlib.contextmanager
    def files_limited(self, name: str) -> Iterator[None]:
        before = {process.pid: process.rlimit(psutil.RLIMIT_FSIZE) for process in self.tree(name)}
        for pid, (_, most) in before.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FILE_BYTES, most))
        try:
            yield
        finally:
            for pid, limits in before.items():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)

    @contextlib.contextmanager
    def memory_limited(self, name: str, more_bytes: int) -> Iterator[None]:
        pid = self.tree(name)[0].pid
        before = resource.prlimit(pid, resource.RLIMIT_DATA)
        resource.prlimit(pid, resource.RLIMIT_DATA, (_data_bytes(pid) + more_bytes, before[1]))
        try:
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_DATA, before)

    @contextlib.contextmanager
    def storage_away(self) -> Iterator[None]:
        self.storage.stop()
        try:
            yield
        finally:
            self.storage.start()

    @contextlib.asynccontextmanager
    async def memory_of_bus_limited(self) -> AsyncIterator[None]:
        used_bytes, before = await self.bus.memory_bytes()
        await raw(self.bus).config_set("maxmemory", used_bytes // 2)
        try:
            yield
        finally:
            await raw(self.bus).config_set("maxmemory", before)

    async def left(self, name: str) -> int:
        """Wait for a replica started by hand, keep its metrics port closed, return its exit code."""
        code = await self.run.left(name)
        keeping = self.around.enter_context(socket.socket())
        keeping.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeping.bind(("127.0.0.1", self.ports[name]))
        return code

    def tree(self, name: str) -> list[psutil.Process]:
        pid = self.run.pid(name)
        assert pid is not None
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]

    async def paused_by(self, guard: str) -> None:
        await self.run.until(lambda: is_in(self.bus, RunState.PAUSED))
        reason = (await Ledger(self.bus).status()).reason
        assert reason.startswith(f"guard {guard}: "), reason

    async def fill(self, steps: int, **changes: object) -> None:
        """Let groups for ``steps`` wait for the trainer, then make ``changes``."""

        async def full() -> bool:
            return await self.bus.length(EXPERIENCE) >= steps * GROUPS

        await self.run.change(algorithm__max_lag=steps)
        async with self.frozen_trainer():
            await self.run.until(full)
            if changes:
                await self.run.change(**changes)

    async def resume(self) -> None:
        await self.run.command("/v1/run/resume")
        await self.train(1)

    async def pin_newest(self) -> None:
        self._pinned = max(await Ledger(self.bus).checkpoints())
        await self.run.command(f"/v1/policies/{self._pinned}/pin")

    async def roll_back(self) -> None:
        await self.run.command(f"/v1/policies/{self._pinned}/rollback", {"reason": "the test"})

    async def train(self, steps: int) -> float:
        """Wait for ``steps`` commits without a pause; return seconds per step."""
        ledger = Ledger(self.bus)
        started_s, goal = time.monotonic(), (await ledger.status()).step + steps

        async def reached() -> bool:
            status = await ledger.status()
            assert status.state is not RunState.PAUSED, status.reason
            return status.step >= goal

        await self.run.until(reached)
        return (time.monotonic() - started_s) / steps


def _data_bytes(pid: int) -> int:
    """Return the memory that RLIMIT_DATA counts."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["VmData"].split()[0]) * 1024


@contextlib.asynccontextmanager
async def prepared(folder: Path, storage: Storage) -> AsyncIterator[Faults]:
    scorer = folder / "scorer"
    write_whole(scorer, "")
    server = TcpServer(folder / "valkey")
    server.start()
    flags = {**FLAGS, "trainer.store.uri": storage.settings().uri, "trainer.store.endpoint": storage.endpoint}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as around:
        disk = around.enter_context(small_disk(folder / "runs", DISK_KIB))
        around.callback(server.kill)
        patch.setenv(VARIABLE, str(scorer))
        await until(lambda: answers(server.port), timeout_s=PATIENCE_S)
        async with running(disk.folder, server.url, flags, prometheus=True) as run:
            await run.until((run.folder / "settings.toml").exists)
            bus = await run.connect()
            quick = ("--internal.executor_profiles", '["stdlib"]', "--internal.executor_check_s", "0.5")
            isolated = around.enter_context(executor_process.running(*quick))
            unsafe = around.enter_context(executor_process.running(*quick, "--reward.executor.isolation", "unsafe"))
            faults = Faults(run, bus, server, storage, disk, scorer, isolated, around)
            await _join(faults, folder)
            await faults.train(1)
            step_s = await faults.train(MEASURED_STEPS)
            faults.slow = f"wait {max(SLOW_STEP_S, SLOWER * step_s) / SAMPLES:.4f}"
            minute_s = max(LEAST_MINUTE_S, STEPS_A_MINUTE * step_s)
            print(f"a minute of the rules: {minute_s:.2f} s")
            targets = {(RUN_ID, "executor", ISOLATED): isolated.metrics, (RUN_ID, "executor", UNSAFE): unsafe.metrics}
            for service, name in IDLE.items():
                targets[IDLE_RUN, service, name] = f"127.0.0.1:{faults.ports[name]}"
            await faults.alarms.hurry(minute_s, TIMES, targets)
            yield faults
            await bus.close()


async def _join(faults: Faults, folder: Path) -> None:
    large, odd = await asyncio.to_thread(_large_model, folder / "large"), _other_model(folder / "odd")
    model = f'{{kind = "model", model = "{large}"}}'
    flags: dict[str, tuple[str, dict[str, object]]] = {
        ODD: ("rollout", {"policy.model": odd}),
        TIGHT: ("reward", {"reward.scorers": f"[{SCORER}, {model}]", "internal.reward_groups": 1}),
        LENIENT: ("reward", {"reward.scorers": f"[{SCORER}, {LENIENT_SCORER}]"}),
    }
    for name in flags:
        await tell_replica(faults.bus, name, Word.CORDONED)
    for service, name in IDLE.items():
        flags[name] = (service, {"run.id": IDLE_RUN})
    for name, (service, own) in flags.items():
        values = {**own, "run.metrics_port": faults.ports[name]}
        faults.run.join(service, name, *(f"--{key}={value}" for key, value in values.items()))
    for name in (ODD, TIGHT, LENIENT):
        await faults.run.until(functools.partial(_is_ready, faults, name))


async def _is_ready(faults: Faults, name: str) -> bool:
    faults.run.check_joined([name])
    return any(beat.replica == name and beat.state in ("waiting", "working") for beat in await heartbeats(faults.bus))


def _other_model(folder: Path) -> Path:
    """Return the example's policy with another computation."""
    shutil.copytree(ROOT / "examples" / "arithmetic" / "policy", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 3e-3}))
    return folder


def _large_model(folder: Path) -> Path:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": MODEL_WIDTH}
    return reward_models.save(reward_models.qwen(**sizes), folder)
