"""Every guard and alert by its fault: one real run, its Prometheus with the shipped rules at shorter minutes, one fault after the other.

Faults come from outside (signals, limits, a scorer that breaks) or by the run's API; each test mends what it did and leaves a run that
trains. A minute of the rules lasts as long as two steps do on this machine. A guard must stand in status, events, its metric and
PenstockGuardActive. docs/operations.md says which fault raises which.
"""

import asyncio
import contextlib
import json
import resource
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from shared.bus import Bus
from shared.durable import write_whole
from shared.ledger import Ledger, RunState
from shared.messages import PolicyVersion
from shared.streams import EXPERIENCE
from shared.telemetry import Heartbeat, heartbeats
from tests import executor_process
from tests.chaos.alarms import Alarms
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import PATIENCE_S, ROOT, Run, TcpServer, answers, free_port, is_in, running
from tests.chaos.spoiled_scorer import VARIABLE
from tests.conftest import need, until

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.debian,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

SCORER = f'{{kind = "python", function = "tests.chaos.spoiled_scorer:score", environment = ["{VARIABLE}"]}}'
MAX_LAG, LONGER_LAG = 1, 6
STILL, SLOW, RUINOUS = 1e-12, 1e-6, 0.02
"""Learning rates: weights stay as they are; groups whose answers differ are there to the end; one step and the policy is gone."""
GROUPS, SAMPLES = 8, 64
"""Of a step."""
FLAGS = {
    "reward.scorers": f"[{SCORER}]",
    "reward.expression": "python",
    "algorithm.advantage": "dr_grpo",  # not divided by the deviation: rewards out of proportion are gradients out of proportion
    "algorithm.max_lag": MAX_LAG,
    "rollout.replicas": 1,
    "bus.max_attempts": 2,
    "bus.drain_s": 20,  # how long the end of the run waits for a frozen trainer: until what failed is told
    "evaluation.problems": 4,
    "weights.deadline_s": 1,
    "weights.probe_every_versions": 2,
    "trainer.learning_rate": SLOW,
    "guards.no_signal.steps": 5,
    "guards.entropy.steps": 2,
    "guards.entropy.floor_nats": 1e-3,
    "guards.lag.action": "pause",  # over at the next step otherwise, and hardly seen
    "guards.lag.steps": 2,
    "guards.lag.stale_share": 0.5,  # a replica that is killed makes fewer old
    "guards.trainer_starving.steps": 4,
    "guards.trainer_starving.share": 0.6,
    "guards.rollouts_starving.window_s": 3,
    "guards.stalled.after_s": 3,
}
LEAST_MINUTE_S, STEPS_A_MINUTE = 0.6, 2
LONGER = {
    "PenstockServiceRestarting": 6,
    "PenstockWeightPullFailures": 6,
    "PenstockTrainerStarving": 2,
    "PenstockLagGrowing": 3,
    "run:penstock_trainer_lag_steps:mean5m": 3,
}
"""So many times longer are minutes in which processes must start, or pulls reach their deadline (1 s; 10 s for a file), or slow steps
be made, several times."""
SLOW_STEP_S, SLOWER = 1.2, 5
"""The slow scorer takes at least so long for a step, and so many times as long as a step takes without it."""
FILE_BYTES = 1024**2
"""Less than a checkpoint's files have; more than the trainer's log."""
ISOLATED, UNSAFE, ODD = "executor-isolated", "executor-unsafe", "rollout-odd"
STEADY_STEPS = 25
"""What the guard of the throughput looks at: five steps, and four times as many before them."""


class Faults:
    """The run, and how to harm it."""

    def __init__(
        self,
        run: Run,
        bus: Bus,
        server: TcpServer,
        scorer: Path,
        isolated: executor_process.Running,
        around: contextlib.ExitStack,
    ) -> None:
        self.run, self.bus, self.server, self.isolated, self.around = run, bus, server, isolated, around
        self.slow = ""
        """What makes the scorer so slow that the trainer mostly waits."""
        self.alarms = Alarms(run, bus)
        self.raised = self.alarms.raised
        self._scorer = scorer
        self._pinned = PolicyVersion(0)
        self.odd_port = free_port()

    @contextlib.contextmanager
    def scorer(self, does: str) -> Iterator[None]:
        """Let the scorer do this (see ``spoiled_scorer``) while the body runs."""
        write_whole(self._scorer, does)
        try:
            yield
        finally:
            write_whole(self._scorer, "")

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Freeze a process, and what is below it, while the body runs."""
        found = self.tree(name)
        for process in found:
            process.suspend()
        try:
            yield
        finally:
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    @contextlib.asynccontextmanager
    async def frozen_trainer(self) -> AsyncIterator[None]:
        """Freeze the trainer while the body runs, at a moment when its replica has the newest weights: later it gets none, and generates nothing."""
        while True:
            with self.frozen("trainer-0"):
                if await self._is_served():
                    yield
                    return
            await self.train(1)

    async def _is_served(self) -> bool:
        """Whether the replica has the newest weights a second from now."""
        settled_s, newest = time.time() + 1, (await Ledger(self.bus).status()).newest_version
        found: list[Heartbeat] = []

        async def told() -> bool:
            beats = await heartbeats(self.bus)
            found[:] = [beat for beat in beats if beat.replica == "rollout-0" and beat.seen_at_s > settled_s]
            return bool(found)

        await self.run.until(told)
        return found[0].version == newest

    @contextlib.contextmanager
    def files_limited(self, name: str) -> Iterator[None]:
        """Let a process write no file that is longer than ``FILE_BYTES`` while the body runs."""
        before = {process.pid: process.rlimit(psutil.RLIMIT_FSIZE) for process in self.tree(name)}
        for pid, (_, most) in before.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FILE_BYTES, most))
        try:
            yield
        finally:
            for pid, limits in before.items():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)

    def tree(self, name: str) -> list[psutil.Process]:
        """Return a process and everything below it."""
        pid = self.run.pid(name)
        assert pid is not None
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]

    async def paused_by(self, guard: str) -> None:
        """Hold that a guard paused the run and that the reason says so."""
        await self.run.until(lambda: is_in(self.bus, RunState.PAUSED))
        reason = (await Ledger(self.bus).status()).reason
        assert reason.startswith(f"guard {guard}: "), reason

    async def fill(self, steps: int, **changes: object) -> None:
        """Let groups for so many steps wait for the trainer, then make ``changes`` (see :meth:`Run.change`)."""

        async def full() -> bool:
            return await self.bus.length(EXPERIENCE) >= steps * GROUPS

        await self.run.change(algorithm__max_lag=steps)
        async with self.frozen_trainer():
            await self.run.until(full)
            if changes:
                await self.run.change(**changes)

    async def resume(self) -> None:
        """Let the run go on."""
        await self.run.command("/v1/run/resume")
        await self.train(1)

    async def pin_newest(self) -> None:
        """Keep the newest checkpoint for :meth:`roll_back`."""
        self._pinned = max(await Ledger(self.bus).checkpoints())
        await self.run.command(f"/v1/policies/{self._pinned}/pin")

    async def roll_back(self) -> None:
        """Go back to the version of :meth:`pin_newest`."""
        await self.run.command(f"/v1/policies/{self._pinned}/rollback", {"reason": "the test"})

    async def train(self, steps: int) -> float:
        """Wait until so many more steps are committed, none of which may pause the run; return the seconds of one."""
        ledger = Ledger(self.bus)
        started_s, goal = time.monotonic(), (await ledger.status()).step + steps

        async def reached() -> bool:
            status = await ledger.status()
            assert status.state is not RunState.PAUSED, status.reason
            return status.step >= goal

        await self.run.until(reached)
        return (time.monotonic() - started_s) / steps


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def faults(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Faults]:
    need("prometheus", "prometheus")
    need("bwrap", "bubblewrap")
    folder = tmp_path_factory.mktemp("faults")
    scorer = folder / "scorer"
    write_whole(scorer, "")
    server = TcpServer(folder / "valkey")
    server.start()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as around:
        around.callback(server.kill)
        patch.setenv(VARIABLE, str(scorer))
        await until(lambda: answers(server.port), timeout_s=PATIENCE_S)
        async with running(folder, server.url, FLAGS, prometheus=True) as run:
            await run.until((run.folder / "settings.toml").exists)
            quick = ("--reward.executor.profiles", '["stdlib"]', "--reward.executor.check_every_s", "0.5")
            isolated = around.enter_context(executor_process.running(*quick))
            unsafe = around.enter_context(executor_process.running(*quick, "--reward.executor.isolation", "unsafe"))
            bus = await run.connect()
            found = Faults(run, bus, server, scorer, isolated, around)
            await found.train(1)
            step_s = await found.train(STEADY_STEPS)
            found.slow = f"wait {max(SLOW_STEP_S, SLOWER * step_s) / SAMPLES:.4f}"
            odd = {"--policy.model": _other_model(folder / "odd"), "--rollout.metrics_port": found.odd_port}
            run.join("rollout", ODD, *(str(word) for pair in odd.items() for word in pair))
            minute_s = max(LEAST_MINUTE_S, STEPS_A_MINUTE * step_s)
            print(f"a minute of the rules: {minute_s:.2f} s")
            await found.alarms.hurry(
                lambda name: minute_s * LONGER.get(name, 1),
                minute_s,
                {ISOLATED: isolated.metrics, UNSAFE: unsafe.metrics},
            )
            yield found
            await bus.close()


def _other_model(folder: Path) -> Path:
    """Return a copy of the example's policy that takes the same weights and computes something else."""
    shutil.copytree(ROOT / "examples" / "arithmetic" / "policy", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 3e-3}))
    return folder


async def test_a_replica_of_another_model_an_executor_without_isolation_and_a_replica_that_is_gone_are_told(
    faults: Faults,
) -> None:
    await faults.alarms.see({"PenstockProbeGap/" + ODD, "PenstockExecutorUnsafe/" + UNSAFE})
    async with faults.raised({"PenstockServiceDown/" + ODD}):
        faults.run.send(ODD, signal.SIGKILL)
        await faults.run.left(ODD)
    faults.around.enter_context(_kept(faults.odd_port))


@contextlib.contextmanager
def _kept(port: int) -> Iterator[None]:
    """Let nobody have a port: another process' metrics there would be those of the replica that is gone."""
    with socket.socket() as keeping:
        keeping.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeping.bind(("127.0.0.1", port))
        yield


async def test_a_scorer_that_slows_down_makes_the_trainer_wait_and_samples_grow_old(faults: Faults) -> None:
    alerts = {"PenstockTrainerStarving", "PenstockLagGrowing", "PenstockCheckpointFailures"}
    await faults.train(STEADY_STEPS)
    async with faults.raised(alerts, {"trainer_starving", "throughput"}) as seen:
        await faults.fill(LONGER_LAG)
        with faults.scorer(faults.slow), faults.files_limited("trainer-0"):
            await seen()
            async with faults.raised(guards={"lag"}):  # what waits for the scorer was sampled several steps ago
                await faults.run.change(algorithm__max_lag=MAX_LAG)
                await faults.paused_by("lag")
    await faults.resume()


async def test_a_trainer_that_stands_still_stalls_the_run_and_starves_its_replicas(faults: Faults) -> None:
    waiting = {"PenstockServiceDown/trainer-0", "PenstockRunStalled", "PenstockRolloutsStarving"}
    behind = {"PenstockWeightPullFailures/rollout-0", "PenstockWeightSyncLag/rollout-0"}
    alerts = {*waiting, *behind, "PenstockGenerationSlow"}
    with contextlib.ExitStack() as slow:
        slow.enter_context(faults.scorer(faults.slow))  # until it is the trainer that everybody waits for
        async with faults.raised(alerts, {"stalled", "rollouts_starving"}) as seen, faults.frozen_trainer():
            slow.close()
            await faults.alarms.see({*waiting, "stalled in status", "rollouts_starving in status"})
            faults.run.send("rollout-0", signal.SIGKILL)  # the next one has nobody to pull from
            await seen()
    await faults.alarms.over({"PenstockServiceDown/trainer-0", "PenstockRunStalled", "PenstockWeightSyncLag/rollout-0"})
    counts = await faults.bus.counts()
    assert not any(count for name, count in counts.items() if name.startswith("dead:")), (
        "that there is nobody to pull from is no fault of a prompt"
    )


async def test_a_scorer_that_fails_buries_its_groups_and_a_leader_that_stands_still_is_missed(faults: Faults) -> None:
    async with faults.raised({"PenstockScorerUnavailable/reward-0", "PenstockDeadLetters"}) as seen:
        with faults.scorer("fail"):
            await seen()
    async with faults.raised({"PenstockNoLeader"}) as seen:
        with faults.frozen("coordinator-0"):
            await seen()
    await _discard_dead_letters(faults.run)
    await faults.alarms.over({"PenstockScorerUnavailable", "PenstockNoLeader", "PenstockDeadLetters"})
    await faults.train(1)


async def _discard_dead_letters(run: Run) -> None:
    async def none() -> bool:
        answer = await run.ask("GET", "/v1/dead-letters")
        if answer is None or not answer.is_success:
            return False
        found = answer.json()["items"]
        for letter in found:
            await run.ask("POST", f"/v1/dead-letters/{letter['stream']}/{letter['entry']}/discard")
        return not found

    await run.until(none)


async def test_rewards_that_are_all_the_same_pause_the_run(faults: Faults) -> None:
    async with faults.raised({"PenstockRewardCollapse"}, {"no_signal"}):
        with faults.scorer("same"):
            await faults.paused_by("no_signal")
    await faults.resume()


async def test_rewards_that_no_sum_can_hold_are_skipped_and_pause_the_run(faults: Faults) -> None:
    async with faults.raised({"PenstockNotFinite"}):
        with faults.scorer("huge"):
            await faults.paused_by("nonfinite")
    await faults.resume()


async def test_a_temperature_near_zero_is_an_entropy_near_zero(faults: Faults) -> None:
    async with faults.raised(guards={"entropy"}):
        await faults.run.change(trainer__learning_rate=STILL)  # near zero it takes little to be far from what sampled
        await faults.train(MAX_LAG + 1)
        await faults.run.change(sampling__temperature=0.001)
        await faults.paused_by("entropy")
    await faults.run.change(sampling__temperature=1.0, trainer__learning_rate=SLOW)
    await faults.resume()


async def test_a_reward_out_of_proportion_is_a_gradient_out_of_proportion(faults: Faults) -> None:
    async with faults.raised({"PenstockGradientExplosion"}):
        await faults.run.change(reward__expression="1000 * python")
    await faults.run.change(reward__expression="python")


async def test_a_learning_rate_out_of_proportion_pauses_the_run_and_whatever_else_happens_it_stays_paused(
    faults: Faults,
) -> None:
    await faults.pin_newest()
    await faults.train(5)
    async with faults.raised({"PenstockRunPaused"}):
        async with faults.raised(guards={"kl"}):
            await _ruin(faults)
            await faults.paused_by("kl")
        await _restart_again_and_again(faults)
        await _harm_executor(faults)
        await _kill_bus(faults)
    assert await is_in(faults.bus, RunState.PAUSED)
    await faults.run.change(trainer__learning_rate=SLOW, algorithm__max_lag=MAX_LAG)


async def _ruin(faults: Faults) -> None:
    """Let the learning rate rise while groups of several steps wait for the trainer: they are far from what it makes of the policy."""
    await faults.fill(LONGER_LAG, trainer__learning_rate=RUINOUS)


@contextlib.asynccontextmanager
async def meanwhile(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Do what never ends while the body runs."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _restart_again_and_again(faults: Faults) -> None:
    alerts = {"PenstockServiceRestarting/reward-0"}
    async with faults.raised(alerts) as seen, meanwhile(_kill_for_ever(faults.run, "reward-0")):
        await seen()


async def _kill_for_ever(run: Run, name: str) -> None:
    """Kill a process whenever Prometheus has seen it."""
    while True:
        with contextlib.suppress(psutil.Error):
            started_s = psutil.Process(run.pid(name) or 0).create_time() - 0.5
            seen = f'process_start_time_seconds{{instance="{name}"}} > {started_s}'
            if await asyncio.to_thread(run.prometheus.ask, seen):
                run.send(name, signal.SIGKILL)
        await asyncio.sleep(0.2)


async def _harm_executor(faults: Faults) -> None:
    alerts = {"PenstockExecutorErrors/" + ISOLATED, "PenstockExecutorEscape/" + ISOLATED}
    async with faults.raised(alerts) as seen, meanwhile(_kill_interpreters_for_ever(faults.isolated)):
        await seen()
    await faults.alarms.over({"PenstockExecutorEscape/" + ISOLATED})


async def _kill_interpreters_for_ever(executor: executor_process.Running) -> None:
    while True:
        for process in executor.processes():
            with contextlib.suppress(psutil.Error):
                if process.pid != executor.process.pid and "python" in process.name():
                    process.kill()
        await asyncio.sleep(0.3)


async def _kill_bus(faults: Faults) -> None:
    names = ("coordinator-0", "rollout-0", "reward-0", "trainer-0")
    alerts = {f"PenstockBusUnavailable/{name}" for name in names}
    for name in names:  # one that starts without a bus tells nothing yet
        reached = f'penstock_bus_available{{instance="{name}"}} == 1'
        await faults.run.until(lambda reached=reached: faults.run.prometheus.ask(reached))  # type: ignore[misc]
    async with faults.raised(alerts) as seen:
        faults.server.kill()
        await seen()
        faults.server.start()
    await faults.alarms.over(alerts)


async def test_a_rollback_mends_what_the_learning_rate_broke_and_one_that_fails_is_told(faults: Faults) -> None:
    run = faults.run
    await faults.roll_back()
    await run.until(lambda: _is_live(run))
    await faults.resume()
    await faults.train(STEADY_STEPS)
    with faults.frozen("trainer-0"):
        async with faults.raised({"PenstockRollbackFailed"}):
            await faults.roll_back()
            await run.command("/v1/run/stop", {"reason": "the test is over"})
    assert await asyncio.to_thread(run.process.wait, PATIENCE_S) == 0, run.report()
    await audit_groups(faults.bus)
    await audit_versions(faults.bus)


async def _is_live(run: Run) -> bool:
    answer = await run.ask("GET", "/v1/operations")
    return answer is not None and answer.json()["items"][0]["state"] == "succeeded"
