"""Laws of the guards: each detects only its condition and follows its setting."""

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from penstock.services.coordinator.run import guards
from penstock.services.coordinator.service import Coordinator, fitting_guards
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Event, PolicyVersion, Prompt, RolloutGroup, StepReport
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.replicas.heartbeats import PartFailure, heartbeats
from penstock.shared.bus.streams import EPISODES, EVENTS, EXPERIENCE, PROMPTS, ROLLOUTS, Stream
from penstock.shared.process.telemetry import WEIGHTS_PROBE, Presence, Status
from penstock.shared.settings import Settings
from penstock.shared.settings.guards import GUARDS, GuardsSettings
from tests.conftest import until
from tests.support import builders
from tests.support.coordinator_players import Trainer, make, replicas, running, settings


def steps(**metrics: list[float]) -> list[StepReport]:
    count = len(next(iter(metrics.values())))
    return [
        StepReport(
            step=step + 1,
            version=PolicyVersion(step + 1),
            finished_at_s=float(step),
            samples=4,
            metrics={name: values[step] for name, values in metrics.items()},
            lag_counts={},
        )
        for step in range(count)
    ]


def test_no_signal_needs_every_group_of_every_step() -> None:
    guard = GuardsSettings(steps=3)
    rewards = [0.0, 0.0, 0.0]
    assert guards.no_signal(steps(zero_std_groups=[2, 2, 2], reward_mean=rewards), guard, 2) == (
        "in 3 steps no group had two different rewards (mean 0): nothing can be learned from them"
    )
    assert guards.no_signal(steps(zero_std_groups=[2, 1, 2], reward_mean=rewards), guard, 2) == ""
    assert guards.no_signal(steps(zero_std_groups=[2, 2], reward_mean=rewards[:2]), guard, 2) == ""


def test_demonstrations_are_no_groups_without_signal() -> None:
    guard, rewards = GuardsSettings(steps=2, limits={"lag": 0.5}), [0.0, 0.0, 0.0]
    mixed = steps(zero_std_groups=[1, 1, 1], reward_mean=rewards, demonstrations=[1, 1, 1])
    assert "no group had two different rewards" in guards.no_signal(mixed, guard, 2), "the only generated group"
    assert (
        guards.no_signal(steps(zero_std_groups=[1, 0, 1], reward_mean=rewards, demonstrations=[1, 1, 1]), guard, 2)
        == ""
    )
    shown = steps(zero_std_groups=[1, 0, 0], reward_mean=rewards, demonstrations=[1, 2, 2])
    assert guards.no_signal(shown, guard, 2) == "", "steps of demonstrations alone say nothing"
    stale = {"stale_samples": [4.0, 4.0], "dropped_stale": [0.6, 0.6]}
    assert guards.lag(steps(demonstrations=[1.0, 1.0], **stale), guard, 2).startswith("73% of the samples")
    assert guards.lag(steps(**stale), guard, 2) != ""


def test_the_kl_ceiling_is_of_the_mean_over_its_steps() -> None:
    guard = GuardsSettings(steps=4, limits={"kl": 0.5})
    assert guards.kl(steps(kl_mean=[9.0, 0.4, 0.5]), guard) == ""
    assert guards.kl(steps(kl_mean=[0.0, 0.4, 0.8]), guard) == (
        "mean KL to the behavior policy over 2 steps is 0.6 nats, ceiling 0.5"
    )
    assert guards.kl(steps(kl_mean=[0.0, 0.0], reference_kl=[3.0, 3.0]), guard) == "", "no ceiling for the reference"
    bounded = GuardsSettings(steps=4, limits={"kl": 0.5, "reference_kl": 2.0})
    assert "reference policy over 2 steps is 3 nats" in guards.kl(
        steps(kl_mean=[0.0, 0.0], reference_kl=[3.0, 3.0]), bounded
    )


def test_the_entropy_floor_is_of_the_mean_over_its_steps() -> None:
    guard = GuardsSettings(steps=2, limits={"entropy": 0.1})
    assert guards.entropy(steps(entropy=[0.0, 0.1, 0.1]), guard) == ""
    assert guards.entropy(steps(entropy=[1.0, 0.1, 0.02]), guard) == "mean entropy over 2 steps is 0.06 nats, floor 0.1"


def test_unscored_counts_groups_that_were_given_up_in_a_row_and_refused_prompts_once_they_are_more_than_the_slots() -> (
    None
):
    guard = GuardsSettings(limits={"unscored": 16})
    assert guards.unscored(guards.GivenUp(15, 31), 32, guard) == ""
    assert guards.unscored(guards.GivenUp(16, 31), 32, guard) == "none of the last 16 groups could be scored"
    assert guards.unscored(guards.GivenUp(15, 32), 32, guard) == "none of the last 32 prompts could be generated"
    assert guards.unscored(guards.GivenUp(0, 15), 8, guard) == ""


async def started(bus: Bus, of: Settings) -> tuple[Ledger, Coordinator]:
    """Return the ledger of a run that is said to run, and the coordinator's parts."""
    ledger, parts = Ledger(bus), make(bus, of)
    await ledger.create()
    await ledger.transition(RunState.RUNNING, "test", [RunState.CREATED])
    return ledger, parts


@pytest.mark.parametrize("stream", [PROMPTS, EPISODES], ids=lambda stream: stream.name)
async def test_a_run_of_which_no_prompt_can_be_generated_pauses_with_the_cause(
    bus: Bus, tmp_path: Path, stream: Stream
) -> None:
    ledger, parts = await started(bus, settings(tmp_path, guards={"limits": {"unscored": 2}}))
    await parts.guards.look(await parts.monitor.view())
    slots = (await parts.monitor.view()).slots
    for group_id in range(slots):
        await bus.append(stream, {"id": str(group_id), "data": wire.encode(builders.prompt(group_id))})
    for delivery in await bus.read(stream, Prompt, "rollout", slots, 0.1):
        await bus.bury(delivery, "no chat template: change policy.tokenizer")
    parts.monitor.forget()
    await parts.guards.look(await parts.monitor.view())
    assert (await ledger.status()).reason.startswith(
        f"guard unscored: none of the last {slots} prompts could be generated; the newest: no chat template: change policy.tokenizer;"
    )
    await ledger.transition(RunState.RUNNING, "test", [RunState.PAUSED])
    parts.monitor.forget()
    shown = {notice.about: notice.text for notice in (await parts.monitor.view()).notices}
    assert shown["dead letters"] == (
        f"dead letters: {slots}, the newest: no chat template: change policy.tokenizer; `penstock dead` lists them"
    )


async def test_a_run_of_which_no_group_can_be_scored_pauses_with_the_cause(bus: Bus, tmp_path: Path) -> None:
    ledger, parts = await started(bus, settings(tmp_path, guards={"limits": {"unscored": 2}}))
    await parts.guards.look(await parts.monitor.view())
    for group_id in range(3):
        await bus.append(ROLLOUTS, {"id": str(group_id), "data": wire.encode(builders.group(group_id))})
    first, second, third = await bus.read(ROLLOUTS, RolloutGroup, "reward", 3, 0.1)
    await bus.bury(first, "no answer in train.jsonl:1")
    await bus.hand_over(second, EXPERIENCE, builders.experience(1))
    parts.monitor.forget()
    await parts.guards.look(await parts.monitor.view())
    await bus.bury(third, "no answer in train.jsonl:3")
    parts.monitor.forget()
    await parts.guards.look(await parts.monitor.view())
    assert parts.guards.active == {}, "one was scored between the two"
    await bus.append(ROLLOUTS, {"id": "4", "data": wire.encode(builders.group(4))})
    (fourth,) = await bus.read(ROLLOUTS, RolloutGroup, "reward", 1, 0.1)
    await bus.bury(fourth, "no answer in train.jsonl:5")
    parts.monitor.forget()
    await parts.guards.look(await parts.monitor.view())
    status = await ledger.status()
    assert (status.state, status.reason) == (
        RunState.PAUSED,
        "guard unscored: none of the last 2 groups could be scored; the newest: no answer in train.jsonl:5; correct the cause "
        "and resume, roll back, "
        "or change [guards]",
    )
    parts.monitor.forget()
    (notice,) = (await parts.monitor.view()).notices
    assert (notice.level, notice.text) == ("error", f"paused: {status.reason}; `penstock resume` continues")
    await ledger.transition(RunState.RUNNING, "test", [RunState.PAUSED])
    parts.monitor.forget()
    await parts.guards.look(await parts.monitor.view())
    assert parts.guards.active == {}, "a run that is resumed has its chance"


async def test_a_replica_whose_logprobs_are_not_the_trainers_pauses_the_run(bus: Bus, tmp_path: Path) -> None:
    ledger, parts = await started(bus, settings(tmp_path))
    await parts.guards.look(await parts.monitor.view())
    assert parts.guards.active == {}
    gap = PartFailure(WEIGHTS_PROBE, "a gap of 0.33 nats", "version 3", 1, 1, time.time())
    status = Status(state="working", failures={WEIGHTS_PROBE: gap})
    stop = asyncio.Event()
    present = asyncio.create_task(Presence(bus, "rollout", "rollout-1", 60.0, status).run(stop))
    await until(lambda: _failing(bus))
    await parts.monitor.read_beats()
    parts.monitor.forget()
    await parts.guards.look(await parts.monitor.view())
    paused = await ledger.status()
    assert (paused.state, paused.reason) == (
        RunState.PAUSED,
        "guard probe: rollout-1: a gap of 0.33 nats; correct the cause and resume, roll back, or change [guards]",
    )
    await ledger.transition(RunState.RUNNING, "test", [RunState.PAUSED])
    parts.monitor.forget()
    await parts.guards.look(await parts.monitor.view())
    assert (await ledger.status()).state is RunState.RUNNING, (
        "until the next probe, a run that is resumed has its chance"
    )
    stop.set()
    await present


async def _failing(bus: Bus) -> bool:
    return any(beat.failures for beat in await heartbeats(bus))


def test_lag_counts_the_samples_that_left_as_stale() -> None:
    guard = GuardsSettings(steps=2, limits={"lag": 0.5})
    assert guards.lag(steps(dropped_stale=[2.0, 2.0]), guard, 2) == "", "4 of 8 is not over a half"
    assert guards.lag(steps(dropped_stale=[3.0, 3.0]), guard, 2).startswith(
        "60% of the samples of 2 steps were dropped as stale"
    )
    assert guards.lag(steps(stale_samples=[4.0, 4.0], dropped_stale=[0.0, 0.0]), guard, 2) == "", "one of two groups"
    assert guards.lag(steps(stale_samples=[4.0, 4.0], dropped_stale=[1.0, 1.0]), guard, 2) != "", "two of three"


def test_a_cliff_is_measured_against_the_steps_before() -> None:
    guard = GuardsSettings(steps=2, limits={"throughput": 0.5})
    assert guards.throughput(steps(tokens_per_s=[100.0, 100.0, 10.0, 100.0, 50.0]), guard) == ""
    assert guards.throughput(steps(tokens_per_s=[100.0, 100.0, 10.0, 100.0, 49.0]), guard) == (
        "49 trained tokens/s over 1 steps, 100 before them"
    )
    assert guards.throughput(steps(tokens_per_s=[100.0, 100.0, 100.0, 1.0]), guard) == "", "too few before them"


def test_a_trainer_starves_when_it_mostly_waits() -> None:
    guard = GuardsSettings(steps=2, limits={"starving": 0.8})
    assert guards.trainer_starving(steps(step_s=[1.0, 1.0], phase_wait_s=[0.8, 0.8]), guard) == ""
    assert "waited 85% of 2 steps" in guards.trainer_starving(steps(step_s=[1.0, 1.0], phase_wait_s=[0.9, 0.8]), guard)


def test_replicas_starve_when_groups_pile_up_before_the_trainer() -> None:
    assert guards.rollouts_starving([True] * 48 + [False] * 12, 60, 0.8) == ""
    assert "in 82% of the last 60 s" in guards.rollouts_starving([True] * 49 + [False] * 11, 60, 0.8)
    assert guards.rollouts_starving([True] * 59, 60, 0.8) == "", "not looked at for long enough"


def test_a_run_is_stalled_after_its_time() -> None:
    assert guards.stalled(10.0, GuardsSettings(limits={"stalled": 10.0})) == ""
    assert guards.stalled(11.0, GuardsSettings(limits={"stalled": 10.0})) == "no step was committed for 11 s"


async def _trips(parts: Coordinator, name: str) -> None:
    await until(lambda: name in parts.guards.active)


def _trip_count(name: str, action: str) -> float:
    count = REGISTRY.get_sample_value("penstock_coordinator_guard_trips_total", {"guard": name, "action": action})
    return count or 0.0


async def test_a_guard_that_pauses_says_why_everywhere_and_a_resumed_run_has_its_chance(
    bus: Bus, tmp_path: Path
) -> None:
    ledger = Ledger(bus)
    before = _trip_count("no_signal", "pause")
    of = settings(tmp_path, steps=50, guards={"steps": 2, "off": ["stalled"]})
    async with running(make(bus, of)) as parts, replicas(bus):
        trainer = await Trainer(bus).start()
        await trainer.step(zero_std_groups=1.0)
        await trainer.step(zero_std_groups=2.0)
        await trainer.step(zero_std_groups=2.0)
        await _trips(parts, "no_signal")
        await until(lambda: _is(ledger, RunState.PAUSED))
        reason = (await ledger.status()).reason
        assert reason.startswith("guard no_signal: in 2 steps no group had two different rewards")
        assert reason.endswith("correct the cause and resume, roll back, or change [guards]")
        assert [guard.guard for guard in (await parts.monitor.view()).guards] == ["no_signal"]
        assert _trip_count("no_signal", "pause") == before + 1
        await ledger.transition(RunState.RUNNING, "test", [RunState.PAUSED])
        await until(lambda: not parts.guards.active)
        assert (await ledger.status()).state is RunState.RUNNING


async def test_who_leads_next_goes_on_from_what_is_wrong_and_does_not_tell_it_again(bus: Bus, tmp_path: Path) -> None:
    of = settings(tmp_path, steps=50, guards={"pause": [], "steps": 1, "limits": {"entropy": 0.1}})
    before = _trip_count("entropy", "tell")
    async with replicas(bus):
        trainer = await Trainer(bus).start()
        async with running(make(bus, of)) as first:
            await trainer.step(entropy=0.05)
            await _trips(first, "entropy")
        follower = make(bus, of)
        (guard,) = (await follower.monitor.view()).guards
        assert (guard.guard, guard.action) == ("entropy", "tell")
        async with running(follower):
            await until(lambda: len(follower.guards._looks) >= 2)
            assert follower.guards.active["entropy"].since_s == guard.since_s
            assert _trip_count("entropy", "tell") == before + 1
            await trainer.step(entropy=0.5)
            await until(lambda: not follower.guards.active)
        assert (await make(bus, of).monitor.view()).guards == []


async def test_a_step_that_goes_wrong_between_two_looks_is_found_and_over_at_the_next(bus: Bus, tmp_path: Path) -> None:
    ledger = Ledger(bus)
    of = settings(tmp_path, guards={"pause": [], "steps": 4, "limits": {"kl": 0.5}})
    parts = make(bus, of)
    await ledger.create()
    await ledger.transition(RunState.RUNNING, "test", [RunState.CREATED])
    now_s = time.time()
    told = [
        dataclasses.replace(report, finished_at_s=now_s + report.step)
        for report in steps(kl_mean=[0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    ]
    seen: list[StepReport] = []
    watcher = guards.Guards(bus, ledger, of.guards, 2, parts.monitor.view, lambda: seen, tuple, lambda: None, 60)
    for count, active in ((2, []), (6, ["kl"]), (6, [])):
        seen[:] = told[:count]
        await watcher.look(await parts.monitor.view())
        assert list(watcher.active) == active
    names = [event.name for _, event in reversed(await bus.newest(EVENTS, Event, 9))]
    assert names == ["guard kl", "guard kl over"]


async def test_of_guards_that_trip_in_one_look_the_first_to_go_wrong_comes_first(bus: Bus, tmp_path: Path) -> None:
    ledger = Ledger(bus)
    thresholds = {"limits": {"kl": 0.5, "entropy": 0.1, "lag": 0.5}}
    of = settings(tmp_path, guards={"pause": [], "off": ["trainer_starving", "throughput"], "steps": 1, **thresholds})
    parts = make(bus, of)
    await ledger.create()
    await ledger.transition(RunState.RUNNING, "test", [RunState.CREATED])
    made = steps(
        dropped_stale=[0.0, 9.0, 9.0, 9.0, 9.0],
        kl_mean=[0.0, 0.0, 1.0, 1.0, 1.0],
        zero_std_groups=[0.0, 0.0, 0.0, 2.0, 2.0],
        reward_mean=[0.0] * 5,
        entropy=[1.0, 1.0, 1.0, 1.0, 0.0],
    )
    reports = [dataclasses.replace(report, finished_at_s=time.time() + report.step) for report in made]
    watcher = guards.Guards(bus, ledger, of.guards, 2, parts.monitor.view, lambda: reports, tuple, lambda: None, 60)
    await watcher.look(await parts.monitor.view())
    names = [event.name for _, event in reversed(await bus.newest(EVENTS, Event, 9))]
    assert names == ["guard lag", "guard kl", "guard no_signal", "guard entropy"]


def test_guards_of_generation_are_off_where_nothing_is_generated() -> None:
    supervised = Settings.model_validate({"algorithm": {"loss": "cross_entropy"}, "guards": {"off": ["throughput"]}})
    watched = set(GUARDS) - set(fitting_guards(supervised).off)
    assert watched == {"kl", "entropy", "stalled"}
    assert fitting_guards(Settings()).off == ()


async def _is(ledger: Ledger, state: RunState) -> bool:
    return (await ledger.status()).state is state


@pytest.mark.parametrize(
    ("name", "told", "metrics"),
    [
        ("kl", {"steps": 1, "limits": {"kl": 0.1}}, {"kl_mean": 0.2}),
        ("entropy", {"steps": 1, "limits": {"entropy": 0.1}}, {"entropy": 0.05}),
        ("lag", {"steps": 1, "limits": {"lag": 0.5}}, {"dropped_stale": 9.0}),
        ("trainer_starving", {"steps": 1}, {"step_s": 1.0, "phase_wait_s": 0.9}),
        ("stalled", {"limits": {"stalled": 0.2}}, {"step_s": 1.0}),
    ],
)
async def test_a_guard_that_only_tells_leaves_the_run_running(
    bus: Bus, tmp_path: Path, name: str, told: dict[str, Any], metrics: dict[str, float]
) -> None:
    ledger = Ledger(bus)
    chosen = {"pause": [], "off": [] if name == "stalled" else ["stalled"], **told}
    async with running(make(bus, settings(tmp_path, steps=50, guards=chosen))) as parts, replicas(bus):
        trainer = await Trainer(bus).start()
        await trainer.step(**metrics)
        await _trips(parts, name)
        assert (await ledger.status()).state is RunState.RUNNING
        assert parts.guards.active[name].action == "tell"
