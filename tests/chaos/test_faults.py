"""Every guard and alert by its fault: one real run with a hurried Prometheus.

Faults come from outside (signals, limits, a broken scorer) or the API; each test leaves a run that trains. A minute
of the rules lasts two steps. Each guard also raises PenstockGuardActive.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine

import psutil
import pytest
import pytest_asyncio

from penstock.shared.bus.stores.policy.ledger import RunState
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.faults import (
    DISK_KIB,
    IDLE_RUN,
    ISOLATED,
    LENIENT,
    LONGER_LAG,
    MAX_LAG,
    MODEL_ROOM_BYTES,
    ODD,
    RUINOUS,
    SLOW,
    STEADY_STEPS,
    STEPS,
    STILL,
    TIGHT,
    UNSAFE,
    Faults,
    prepared,
)
from tests.chaos.run import Run, is_in
from tests.conftest import PATIENCE_S, need
from tests.support import executor_process
from tests.support.object_storage import Storage

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.debian,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def faults(tmp_path_factory: pytest.TempPathFactory, server_of_objects: Storage) -> AsyncIterator[Faults]:
    need("prometheus", "prometheus")
    need("bwrap", "bubblewrap")
    async with prepared(tmp_path_factory.mktemp("faults"), server_of_objects) as prepared_faults:
        yield prepared_faults


async def test_a_replica_of_another_model_an_executor_without_isolation_and_a_replica_that_is_gone_are_told(
    faults: Faults,
) -> None:
    guarded = {f"{guard} in {place}" for guard in ("probe",) for place in ("status", "alerts")}
    await faults.alarms.see({"PenstockProbeGap/" + ODD, "PenstockExecutorUnsafe/" + UNSAFE, *guarded})
    async with faults.raised({"PenstockServiceDown/" + ODD}):
        faults.run.send(ODD, signal.SIGKILL)
        await faults.left(ODD)


async def test_a_run_that_nothing_trains_is_reported_and_so_is_its_replica_once_it_is_stopped(faults: Faults) -> None:
    await faults.alarms.see({"PenstockRunNotStarted"})
    async with faults.raised({"PenstockRunHoldsGpus"}):
        await faults.run.command("/v1/run/stop", {"reason": "the test"}, run_id=IDLE_RUN)


async def test_a_scorer_that_accepts_wrong_numbers_is_reported(faults: Faults) -> None:
    async with faults.raised({"PenstockRewardDependsOnLeniency"}):
        await faults.run.command(f"/v1/services/{LENIENT}/uncordon")
    await faults.run.command(f"/v1/services/{LENIENT}/drain")
    assert await faults.left(LENIENT) == 0


async def test_a_bus_at_its_maxmemory_is_reported_and_admission_continues_when_there_is_room(faults: Faults) -> None:
    alerts = {"PenstockBusFull", "PenstockBusNearlyFull"}
    async with faults.raised(alerts) as seen, faults.memory_of_bus_limited():
        await seen()
    await faults.alarms.over(alerts)
    await faults.train(1)


async def test_a_disk_that_is_nearly_full_is_reported_and_the_run_continues(faults: Faults) -> None:
    if not faults.disk.mounted:
        pytest.skip("a tmpfs cannot be mounted here: run as root")
    async with faults.raised({"PenstockDiskNearlyFull"}) as seen:
        with faults.disk.full(left_bytes=DISK_KIB * 1024 // 20):
            await seen()
            await faults.train(1)
    await faults.alarms.over({"PenstockDiskNearlyFull"})


async def test_a_reward_model_that_finds_no_memory_is_told_and_scores_fewer_samples_at_a_time(faults: Faults) -> None:
    run, scored = faults.run, f'penstock_reward_samples_scored_total{{instance="{TIGHT}",scorer="model",status="ok"}}'
    await run.until(lambda: run.prometheus.ask(f'penstock_reward_model_out_of_memory_total{{instance="{TIGHT}"}} == 0'))
    with faults.memory_limited(TIGHT, MODEL_ROOM_BYTES):
        async with faults.raised({"PenstockOutOfMemory/" + TIGHT}):
            await run.command(f"/v1/services/{TIGHT}/uncordon")
        await run.until(lambda: run.prometheus.ask(f"{scored} > 0"))
    await run.command(f"/v1/services/{TIGHT}/drain")
    assert await faults.left(TIGHT) == 0
    assert not await _dead(faults), "what is tried again with fewer samples is no fault of a group"


async def _dead(faults: Faults) -> dict[str, int]:
    counts = await faults.bus.counts()
    return {name: count for name, count in counts.items() if name.startswith("dead:") and count}


async def test_object_storage_that_is_away_is_told_and_the_newest_checkpoint_is_stored_later(faults: Faults) -> None:
    async with faults.raised({"PenstockCheckpointNotStored"}) as seen:
        with faults.storage_away():
            await seen()
    await faults.alarms.over({"PenstockCheckpointNotStored"})


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
        slow.enter_context(faults.scorer(faults.slow))  # until all processes wait for the trainer
        async with faults.raised(alerts, {"stalled", "rollouts_starving"}) as seen, faults.frozen_trainer():
            slow.close()
            await faults.alarms.see({*waiting, "stalled in status", "rollouts_starving in status"})
            faults.run.send("rollout-0", signal.SIGKILL)  # the next one has no peer to pull from
            await seen()
    await faults.alarms.over({"PenstockServiceDown/trainer-0", "PenstockRunStalled", "PenstockWeightSyncLag/rollout-0"})
    assert not await _dead(faults), "that there is nobody to pull from is no fault of a prompt"


async def test_a_scorer_that_fails_buries_its_groups_and_a_leader_that_stands_still_is_missed(faults: Faults) -> None:
    async with faults.raised({"PenstockScorerUnavailable/reward-0", "PenstockDeadLetters"}, {"unscored"}) as seen:
        with faults.scorer("fail"):
            await seen()
            await faults.paused_by("unscored")
    await faults.run.command("/v1/run/resume")
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
        letters = answer.json()["items"]
        for letter in letters:
            await run.ask("POST", f"/v1/dead-letters/{letter['stream']}/{letter['entry']}/discard")
        return not letters

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
        await faults.run.change(trainer__learning_rate=STILL)  # near zero a small change is far from what was sampled
        await faults.train(MAX_LAG + 1)
        with faults.scorer("differ"):  # equal answers would otherwise trip no_signal as well
            await faults.run.change(sampling__temperature=0.01)
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
    """Raise the learning rate while groups of several steps wait for the trainer."""
    await faults.fill(LONGER_LAG, trainer__learning_rate=RUINOUS)


@contextlib.asynccontextmanager
async def meanwhile(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
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
    for name in names:  # one that starts without a bus has no metrics yet
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
    await faults.train(STEPS)
    with faults.frozen("trainer-0"):
        async with faults.raised({"PenstockRollbackFailed"}):
            await faults.roll_back()
            await run.command("/v1/run/stop", {"reason": "the test is over"})
    assert await asyncio.to_thread(run.process.wait, PATIENCE_S) == 0, run.report()
    await audit_groups(faults.bus)
    await audit_versions(faults.bus)


async def _is_live(run: Run) -> bool:
    answer = await run.ask("GET", "/v1/operations")
    return answer is not None and answer.is_success and answer.json()["items"][0]["state"] == "succeeded"
