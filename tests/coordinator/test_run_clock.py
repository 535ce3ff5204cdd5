"""Laws of the run's clock: time counts only while processes of the run are there."""

import dataclasses
from pathlib import Path

import pytest

from penstock.services.coordinator.records.summary import training_seconds
from penstock.services.coordinator.run.lifecycle import create, note_state
from penstock.services.coordinator.run.monitor import eta_s
from penstock.services.coordinator.run.run_clock import RunClock
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import RUN
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat, beat_once, count_start, note_told
from tests.coordinator.records.test_recorder import STATUS, commit_group
from tests.support.raw_redis import empty

BEGUN_S, STOPPED_S, HOUR_S, STEPS = 1000.0, 2000.0, 3600.0, 50


async def stopped_run(bus: Bus) -> RunClock:
    """Return the clock of a run that began to train at 1,000 s, and whose processes were last seen at 2,000 s."""
    ledger = Ledger(bus)
    await ledger.create()
    await ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    fields = {
        "first_admission_s": BEGUN_S,
        "last_commit_s": STOPPED_S - 3,
        "changed_at_s": BEGUN_S,
        "alive_s": STOPPED_S,
    }
    for name, value in fields.items():
        await bus.write(RUN, "HSET", name, value)
    return RunClock(bus, ledger, STEPS)


async def training_s(bus: Bus, now_s: float) -> float:
    return training_seconds(await Ledger(bus).status(), STEPS, now_s)


async def put_beat(bus: Bus, started_at_s: float, seen_at_s: float, service: str = "trainer") -> None:
    beat = Heartbeat(service, f"{service}-0", "working", None, "a", 1, "", started_at_s, seen_at_s, 0, "", {})
    await beat_once(bus, beat, 1000.0)


async def test_a_stop_of_any_length_is_no_training_time_and_is_counted_once(bus: Bus) -> None:
    clock = await stopped_run(bus)
    await clock.resume(STOPPED_S + HOUR_S, STOPPED_S + HOUR_S)
    assert await training_s(bus, STOPPED_S + HOUR_S) == 1000.0
    await clock.resume(STOPPED_S + HOUR_S + 1, STOPPED_S + HOUR_S + 1)  # another leader
    assert await training_s(bus, STOPPED_S + HOUR_S + 60) == 1060.0
    status = await Ledger(bus).status()
    assert status.resumed_s == STOPPED_S + HOUR_S, "from which on no commit is missed"
    assert (status.gpu_s, status.gpu_until_s) == (0.0, STOPPED_S + HOUR_S), "a dead process's heartbeat holds no GPU"


async def test_a_new_leader_beside_processes_that_ran_all_the_time_skips_nothing(bus: Bus) -> None:
    clock = await stopped_run(bus)
    await put_beat(bus, BEGUN_S, STOPPED_S + HOUR_S - 2)
    await clock.resume(STOPPED_S + HOUR_S, STOPPED_S + HOUR_S)
    assert await training_s(bus, STOPPED_S + HOUR_S) == 1000.0 + HOUR_S


async def test_what_processes_did_before_the_leader_led_hides_no_stop(bus: Bus) -> None:
    clock = await stopped_run(bus)
    await put_beat(bus, STOPPED_S + HOUR_S - 9, STOPPED_S + HOUR_S - 1)
    await put_beat(bus, BEGUN_S, STOPPED_S + HOUR_S, "coordinator")
    await bus.write(RUN, "HSET", "last_commit_s", STOPPED_S + HOUR_S - 2)
    await clock.resume(STOPPED_S + HOUR_S - 7, STOPPED_S + HOUR_S)
    assert await training_s(bus, STOPPED_S + HOUR_S) == 1009.0, "since the first process began"


async def test_a_coordinator_that_was_there_all_the_time_skips_nothing(bus: Bus) -> None:
    clock = await stopped_run(bus)
    await clock.resume(BEGUN_S, STOPPED_S + HOUR_S)
    assert (await Ledger(bus).status()).paused_s == 0.0


@pytest.mark.parametrize(
    ("state", "step"), [(RunState.PAUSED, 3), (RunState.FINISHED, STEPS), (RunState.RUNNING, STEPS)]
)
async def test_a_stop_while_a_run_does_not_train_is_not_counted_twice(bus: Bus, state: RunState, step: int) -> None:
    clock = await stopped_run(bus)
    for name, value in (("state", state.value), ("step", step), ("changed_at_s", STOPPED_S - 3)):
        await bus.write(RUN, "HSET", name, value)
    await clock.resume(STOPPED_S + HOUR_S, STOPPED_S + HOUR_S)
    assert await training_s(bus, STOPPED_S + HOUR_S) == 997.0
    assert (await Ledger(bus).status()).paused_s == 0.0


@pytest.mark.parametrize(
    ("left", "since_s", "states", "expected_s"),
    [
        (RunState.PAUSED, STOPPED_S - 1, [RunState.RUNNING, RunState.STOPPED], 997.0),
        (RunState.PAUSED, STOPPED_S - 1, [RunState.STOPPED], 997.0),
        (RunState.PAUSED, STOPPED_S - 9, [RunState.RUNNING, RunState.STOPPED], 991.0),  # the last step was made in it
        (RunState.PAUSED, STOPPED_S - 9, [RunState.STOPPED], 991.0),
        (RunState.FINISHED, STOPPED_S, [RunState.RUNNING, RunState.PAUSED, RunState.RUNNING, RunState.STOPPED], 997.0),
    ],
)
async def test_a_pause_after_the_last_step_takes_no_time_from_those_before(
    bus: Bus, left: RunState, since_s: float, states: list[RunState], expected_s: float
) -> None:
    await stopped_run(bus)
    for name, value in (("state", left.value), ("changed_at_s", since_s)):
        await bus.write(RUN, "HSET", name, value)
    for state in states:
        await Ledger(bus).transition(state, "", [left])
        left = state
    assert await training_s(bus, 0.0) == pytest.approx(expected_s, abs=1e-3)  # kept to 1e-6 s


async def test_a_pause_before_the_first_admission_takes_no_time_from_that_after_it(bus: Bus) -> None:
    await stopped_run(bus)
    await bus.write(RUN, "HDEL", "first_admission_s", "last_commit_s")
    await Ledger(bus).transition(RunState.PAUSED, "", [RunState.RUNNING])
    await bus.write(RUN, "HSET", "changed_at_s", BEGUN_S)
    await Ledger(bus).transition(RunState.RUNNING, "", [RunState.PAUSED])
    await bus.write(RUN, "HSET", "first_admission_s", STOPPED_S)
    assert await training_s(bus, STOPPED_S + 60) == 60.0


async def test_an_extended_run_whose_lost_bus_did_not_name_the_last_commit_counts_its_time_from_the_extension(
    bus: Bus,
) -> None:
    """What is noted every 10 s knew of none, and the trainer's checkpoint had the last step."""
    await stopped_run(bus)
    await bus.write(RUN, "HDEL", "last_commit_s")
    for name, value in (("state", "finished"), ("changed_at_s", STOPPED_S)):
        await bus.write(RUN, "HSET", name, value)
    await Ledger(bus).transition(RunState.RUNNING, "", [RunState.FINISHED])
    status = await Ledger(bus).status()
    assert status.paused_s == pytest.approx(status.changed_at_s - STOPPED_S, abs=1e-3)
    assert await training_s(bus, status.changed_at_s + 5) == pytest.approx(STOPPED_S - BEGUN_S + 5, abs=1e-3)


async def test_a_stop_of_processes_after_the_last_step_takes_no_time_from_those_before(
    bus: Bus, tmp_path: Path
) -> None:
    clock, ledger = await stopped_run(bus), Ledger(bus)
    await clock.resume(STOPPED_S + HOUR_S, STOPPED_S + HOUR_S)
    await ledger.transition(RunState.STOPPED, "", [RunState.RUNNING])
    assert await training_s(bus, 0.0) == 997.0
    note_state(tmp_path, await ledger.status())
    await empty(bus)
    await create(ledger, tmp_path)
    assert await training_s(bus, 0.0) == 997.0


async def test_a_stop_of_processes_that_is_counted_after_a_step_was_before_it(bus: Bus) -> None:
    clock = await stopped_run(bus)
    await put_beat(bus, STOPPED_S + HOUR_S - 9, STOPPED_S + HOUR_S - 1)
    await bus.write(RUN, "HSET", "last_commit_s", STOPPED_S + HOUR_S - 2)
    await clock.resume(STOPPED_S + HOUR_S - 7, STOPPED_S + HOUR_S)
    await Ledger(bus).transition(RunState.STOPPED, "", [RunState.RUNNING])
    assert await training_s(bus, 0.0) == 1007.0


async def test_a_step_after_a_stop_of_processes_ends_the_training_time(bus: Bus) -> None:
    clock, ledger = await stopped_run(bus), Ledger(bus)
    await clock.resume(STOPPED_S + HOUR_S, STOPPED_S + HOUR_S)
    await commit_group(bus, 0)
    await ledger.transition(RunState.STOPPED, "", [RunState.RUNNING])
    status = await ledger.status()
    assert status.last_commit_s is not None
    assert await training_s(bus, 0.0) == status.last_commit_s - BEGUN_S - HOUR_S


async def test_a_run_whose_bus_was_lost_while_it_was_stopped_keeps_its_time(bus: Bus, tmp_path: Path) -> None:
    clock, ledger = await stopped_run(bus), Ledger(bus)
    note_state(tmp_path, await ledger.status())
    await empty(bus)
    await create(ledger, tmp_path)
    await clock.resume(STOPPED_S + HOUR_S, STOPPED_S + HOUR_S)
    assert await training_s(bus, STOPPED_S + HOUR_S) == 1000.0
    status = await ledger.status()
    assert (status.last_commit_s, status.changed_at_s) == (STOPPED_S - 3, BEGUN_S)


def test_the_eta_is_of_steps_and_no_stop_between_them() -> None:
    assert eta_s(STATUS, 13, [None, 9.0, *[2.0] * 20]) == 20.0, "of the newest 20"
    assert eta_s(STATUS, 13, []) is None
    assert eta_s(dataclasses.replace(STATUS, state=RunState.PAUSED), 13, [2.0]) is None


async def test_a_process_that_was_told_to_stop_did_not_die_however_it_ended(bus: Bus) -> None:
    assert await count_start(bus, "coordinator-0", "first") == (1, True)
    await note_told(bus, "coordinator-0")  # and is killed while it leaves
    assert await count_start(bus, "coordinator-0", "second") == (2, False)
    assert await count_start(bus, "coordinator-0", "third") == (3, True)
