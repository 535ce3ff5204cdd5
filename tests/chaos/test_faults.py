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
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from shared.bus import Bus
from shared.ledger import Ledger, PolicyState, RunState
from tests import executor_process
from tests.chaos.alarms import Alarms
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import PATIENCE_S, ROOT, Run, TcpServer, answers, is_in, running
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
FLAGS = {
    "reward.scorers": f"[{SCORER}]",
    "reward.expression": "python",
    "algorithm.advantage": "dr_grpo",  # not divided by the deviation: rewards out of proportion are gradients out of proportion
    "algorithm.max_lag": 1,
    "rollout.replicas": 1,
    "bus.max_attempts": 2,
    "evaluation.problems": 4,
    "weights.deadline_s": 1,
    "weights.probe_every_versions": 2,
    "trainer.learning_rate": 2e-5,  # learns slowly: groups whose answers differ are needed to the end
    "guards.no_signal.steps": 5,
    "guards.kl.steps": 1,
    "guards.entropy.steps": 2,
    "guards.entropy.floor_nats": 1e-3,
    "guards.lag.steps": 2,
    "guards.throughput.steps": 2,
    "guards.trainer_starving.steps": 2,
    "guards.trainer_starving.share": 0.6,
    "guards.rollouts_starving.window_s": 3,
    "guards.stalled.after_s": 3,
}
LEAST_MINUTE_S, STEPS_A_MINUTE = 0.6, 2
LONGER = {"PenstockServiceRestarting": 3, "PenstockWeightPullFailures": 3}
"""So many times longer are minutes in which processes must start, or pulls reach their deadline (1 s; 10 s for a file), several times."""
FILE_BYTES = 1024**2
"""Less than a checkpoint's files have; more than the trainer's log."""
ISOLATED, UNSAFE, ODD = "executor-isolated", "executor-unsafe", "rollout-odd"
STEADY_STEPS = 10
"""What the guard of the throughput looks at: two steps, and four times as many before them."""
SAMPLES = 64
"""Of a step."""


class Faults:
    """The run, and how to harm it."""

    def __init__(self, run: Run, bus: Bus, server: TcpServer, scorer: Path, isolated: executor_process.Running) -> None:
        self.run, self.bus, self.server, self.isolated = run, bus, server, isolated
        self.step_s = 0.0
        """How long a step takes without a fault."""
        self.alarms = Alarms(run, bus)
        self.raised = self.alarms.raised
        self._scorer = scorer

    @contextlib.contextmanager
    def scorer(self, does: str) -> Iterator[None]:
        """Let the scorer do this (see ``spoiled_scorer``) while the body runs."""
        _write(self._scorer, does)
        try:
            yield
        finally:
            _write(self._scorer, "")

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

    async def paused_by(self, *guards: str) -> None:
        """Hold that one of these guards paused the run and that the reason says so."""
        await until(lambda: is_in(self.bus, RunState.PAUSED), timeout_s=PATIENCE_S)
        assert (await Ledger(self.bus).status()).reason.startswith(tuple(f"guard {guard}: " for guard in guards))

    async def resume(self) -> None:
        """Let the run go on."""
        await self.run.command("/v1/run/resume")
        await self.train(1)

    async def train(self, steps: int) -> float:
        """Wait until so many more steps are committed, none of which may pause the run; return the seconds of one."""
        ledger = Ledger(self.bus)
        started_s, goal = time.monotonic(), (await ledger.status()).step + steps

        async def reached() -> bool:
            self.run.check()
            status = await ledger.status()
            assert status.state is not RunState.PAUSED, status.reason
            return status.step >= goal

        await until(reached, timeout_s=PATIENCE_S)
        return (time.monotonic() - started_s) / steps


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def faults(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Faults]:
    need("prometheus", "prometheus")
    need("bwrap", "bubblewrap")
    folder = tmp_path_factory.mktemp("faults")
    scorer = folder / "scorer"
    _write(scorer, "")
    server = TcpServer(folder / "valkey")
    server.start()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as around:
        around.callback(server.kill)
        patch.setenv(VARIABLE, str(scorer))
        await until(lambda: answers(server.port), timeout_s=PATIENCE_S)
        async with running(folder, server.url, FLAGS, prometheus=True) as run:
            await until((run.folder / "settings.toml").exists, timeout_s=PATIENCE_S)
            quick = ("--reward.executor.profiles", '["stdlib"]', "--reward.executor.check_every_s", "0.5")
            isolated = around.enter_context(executor_process.running(*quick))
            unsafe = around.enter_context(executor_process.running(*quick, "--reward.executor.isolation", "unsafe"))
            bus = await run.connect()
            found = Faults(run, bus, server, scorer, isolated)
            await found.train(1)
            found.step_s = await found.train(STEADY_STEPS)
            run.join("rollout", ODD, "--policy.model", str(_other_model(folder / "odd")))
            minute_s = max(LEAST_MINUTE_S, STEPS_A_MINUTE * found.step_s)
            print(f"a minute of the rules: {minute_s:.2f} s")
            await found.alarms.hurry(
                lambda name: minute_s * LONGER.get(name, 1),
                minute_s,
                {ISOLATED: isolated.metrics, UNSAFE: unsafe.metrics},
            )
            yield found
            await bus.close()


def _write(scorer: Path, does: str) -> None:
    beside = scorer.with_suffix(".new")
    beside.write_text(does)
    beside.replace(scorer)


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


async def test_a_scorer_that_slows_down_makes_the_trainer_wait_and_samples_grow_old(faults: Faults) -> None:
    wait_s = 4 * faults.step_s / SAMPLES
    alerts = {"PenstockTrainerStarving", "PenstockLagGrowing", "PenstockCheckpointFailures"}
    async with faults.raised(alerts, {"trainer_starving", "throughput"}):
        await faults.train(STEADY_STEPS)
        await faults.run.change(algorithm__max_lag=6)
        with faults.scorer(f"wait {wait_s:.4f}"), faults.files_limited("trainer-0"):
            await faults.alarms.see(alerts)
    async with faults.raised(set(), {"lag"}):
        await faults.run.change(algorithm__max_lag=1)


async def test_a_trainer_that_stands_still_stalls_the_run_and_starves_its_replicas(faults: Faults) -> None:
    waiting = {"PenstockServiceDown/trainer-0", "PenstockRunStalled", "PenstockRolloutsStarving"}
    behind = {"PenstockWeightPullFailures/rollout-0", "PenstockWeightSyncLag/rollout-0"}
    async with faults.raised({*waiting, "PenstockGenerationSlow", *behind}, {"stalled", "rollouts_starving"}):
        with faults.frozen("trainer-0"):
            await faults.alarms.see(
                {*waiting, "PenstockGenerationSlow", "stalled in status", "rollouts_starving in status"}
            )
            faults.run.send("rollout-0", signal.SIGKILL)  # the next one has nobody to pull from
            await faults.alarms.see(behind)
    await faults.alarms.over({"PenstockServiceDown/trainer-0", "PenstockRunStalled", *behind})
    counts = await faults.bus.counts()
    assert not any(count for name, count in counts.items() if name.startswith("dead:")), (
        "that there is nobody to pull from is no fault of a prompt"
    )


async def test_a_scorer_that_fails_buries_its_groups_and_a_leader_that_stands_still_is_missed(faults: Faults) -> None:
    async with faults.raised({"PenstockScorerUnavailable/reward-0", "PenstockNoLeader", "PenstockDeadLetters"}):
        with faults.scorer("fail"):
            with faults.frozen("coordinator-0"):
                await faults.alarms.see({"PenstockScorerUnavailable/reward-0", "PenstockNoLeader"})
            await faults.alarms.see({"PenstockDeadLetters"})
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

    await until(none, timeout_s=PATIENCE_S)


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
    async with faults.raised(set(), {"entropy"}):
        await faults.run.change(sampling__temperature=0.001)
        await faults.paused_by("entropy")
    await faults.run.change(sampling__temperature=1.0)
    await faults.resume()


async def test_a_reward_out_of_proportion_is_a_gradient_out_of_proportion(faults: Faults) -> None:
    async with faults.raised({"PenstockGradientExplosion"}):
        await faults.run.change(reward__expression="1000 * python")
        await faults.alarms.see({"PenstockGradientExplosion"})
    await faults.run.change(reward__expression="python")


async def test_a_learning_rate_out_of_proportion_pauses_the_run_and_whatever_else_happens_it_stays_paused(
    faults: Faults,
) -> None:
    async with faults.raised({"PenstockRunPaused"}, {"kl"}):
        await faults.run.change(trainer__learning_rate=0.02)
        await faults.paused_by("kl", "no_signal")  # a policy that is ruined is soon wrong throughout
        await _restart_again_and_again(faults)
        await _harm_executor(faults)
        await _kill_bus(faults)
    assert await is_in(faults.bus, RunState.PAUSED)
    await faults.run.change(trainer__learning_rate=FLAGS["trainer.learning_rate"])


async def _restart_again_and_again(faults: Faults) -> None:
    async with faults.raised({"PenstockServiceRestarting/reward-0"}):
        killing = asyncio.create_task(_kill_for_ever(faults.run, "reward-0"))
        await faults.alarms.see({"PenstockServiceRestarting/reward-0"})
        killing.cancel()


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
    async with faults.raised(alerts):
        killing = asyncio.create_task(_kill_interpreters_for_ever(faults.isolated))
        await faults.alarms.see(alerts)
        killing.cancel()
    await faults.alarms.over({"PenstockExecutorEscape/" + ISOLATED})


async def _kill_interpreters_for_ever(executor: executor_process.Running) -> None:
    while True:
        for process in executor.processes():
            with contextlib.suppress(psutil.Error):
                if process.pid != executor.process.pid and "python" in process.name():
                    process.kill()
        await asyncio.sleep(0.3)


async def _kill_bus(faults: Faults) -> None:
    alerts = {f"PenstockBusUnavailable/{name}" for name in ("coordinator-0", "rollout-0", "reward-0", "trainer-0")}
    async with faults.raised(alerts):
        faults.server.kill()
        await faults.alarms.see(alerts)
        faults.server.start()
    await faults.alarms.over(alerts)


async def test_a_rollback_mends_what_the_learning_rate_broke_and_one_that_fails_is_told(faults: Faults) -> None:
    run = faults.run
    await _roll_back(faults)
    await until(lambda: _is_live(run), timeout_s=PATIENCE_S)
    await faults.resume()
    await faults.train(STEADY_STEPS)
    async with faults.raised({"PenstockRollbackFailed"}):
        with faults.frozen("trainer-0"):
            await _roll_back(faults)
            await run.command("/v1/run/stop", {"reason": "the test is over"})
            await faults.alarms.see({"PenstockRollbackFailed"})
    assert await asyncio.to_thread(run.process.wait, PATIENCE_S) == 0, run.report()
    await audit_groups(faults.bus)
    await audit_versions(faults.bus)


async def _roll_back(faults: Faults) -> None:
    """Go back to the oldest checkpoint that can be gone back to."""
    ledger = Ledger(faults.bus)
    tip, states = (await ledger.status()).tip, await ledger.policy_states()
    kept = [v for v in await ledger.checkpoints() if states.get(v) is not PolicyState.REVOKED and v != tip]
    await faults.run.command(f"/v1/policies/{min(kept)}/rollback", {"reason": "the test"})


async def _is_live(run: Run) -> bool:
    answer = await run.ask("GET", "/v1/operations")
    return answer is not None and answer.json()["items"][0]["state"] == "succeeded"
