"""Laws of a run's life: start, gates, end, and consistent figures."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.run.lifecycle import create, drain, note_state, noted_state
from penstock.services.coordinator.service import Coordinator
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Event, Experience, PolicyVersion, Prompt
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.process.telemetry import Presence, Status
from tests.conftest import PATIENCE_S, until
from tests.support import builders
from tests.support.coordinator_players import Trainer, make, replicas, running, settings
from tests.support.raw_redis import empty, raw
from tests.trainer.test_rollback import _load_and_publish, replica


async def state(bus: Bus) -> RunState:
    return (await Ledger(bus).status()).state


async def reaches(bus: Bus, target: RunState) -> None:
    async def reached() -> bool:
        return await state(bus) is target

    await until(reached)


async def closes(parts: Coordinator) -> None:
    await until(lambda: parts.lifecycle.closed)


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return content


async def test_a_run_trains_its_steps_and_finishes_with_figures_that_add_up(bus: Bus, tmp_path: Path) -> None:
    run = settings(tmp_path, steps=4, heldout=5)
    async with running(make(bus, run)) as parts, replicas(bus, lambda prompt: float((prompt.answer or "0") < "5")):
        trainer = await Trainer(bus).start()
        for _ in range(4):
            await trainer.step()
        await closes(parts)
    summary_json, status = summary(run.run_folder), await Ledger(bus).status()
    assert status.state is RunState.FINISHED
    assert (summary_json["state"], summary_json["steps"], summary_json["samples"], summary_json["head"]) == (
        "finished",
        4,
        16,
        4,
    )
    # held-out answers 0, 2, 4, 6, 8: three of five are right
    assert (summary_json["accuracy_before"], summary_json["accuracy_after"]) == (0.6, 0.6)
    assert (summary_json["reward_first"], summary_json["reward_last"]) == pytest.approx((0.15, 0.35))  # of 0.1 to 0.4
    assert (summary_json["lag_mean"], summary_json["lag_max"]) == (0.25, 1)
    assert summary_json["training_s"] == status.last_commit_s - status.first_admission_s  # type: ignore[operator]
    assert summary_json["samples_per_s"] == 16 / summary_json["training_s"]
    assert summary_json["tokens_per_s"] == 160 / summary_json["training_s"]
    assert summary_json["groups_admitted"] == status.cursor == sum(summary_json["counts"].values())
    assert summary_json["counts"]["trained"] == 8
    names = {path.name for path in run.run_folder.iterdir()}
    assert {"metrics.jsonl", "evaluations.jsonl", "events.jsonl", "summary.json", "report.html"} <= names
    evaluated = [json.loads(line) for line in (run.run_folder / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["initial"], line["final"]) for line in (evaluated[0], evaluated[-1])] == [
        (True, False),
        (False, True),
    ]
    assert (evaluated[-1]["version"], evaluated[-1]["problems"]) == (4, 5)


async def test_a_finished_run_with_more_steps_than_it_had_makes_them_and_finishes_again(
    bus: Bus, tmp_path: Path
) -> None:
    run = settings(tmp_path, steps=2, heldout=5)
    async with running(make(bus, run)) as parts, replicas(bus):
        trainer = await Trainer(bus).start()
        for _ in range(2):
            await trainer.step()
        await closes(parts)
    before = await Ledger(bus).status()
    extended = run.model_copy(update={"run": run.run.model_copy(update={"steps": 4})})
    async with running(make(bus, extended)) as parts, replicas(bus):
        await reaches(bus, RunState.RUNNING)
        status = await Ledger(bus).status()
        assert (status.reason, status.step, status.closed) == ("extended from 2 to 4 steps", 2, False)
        assert before.last_commit_s is not None
        assert status.paused_s == pytest.approx(status.changed_at_s - before.last_commit_s, abs=1e-3)  # kept to 1e-6 s
        for _ in range(2):
            await trainer.step()
        await closes(parts)
    status = await Ledger(bus).status()
    assert (status.state, status.step, status.closed) == (RunState.FINISHED, 4, True)
    summary_json = summary(run.run_folder)
    assert (summary_json["steps"], summary_json["samples"], summary_json["counts"]["trained"]) == (4, 16, 8)
    evaluated = [json.loads(line) for line in (run.run_folder / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["version"], line["final"]) for line in evaluated] == [(0, False), (2, True), (4, True)]
    events = [json.loads(line)["name"] for line in (run.run_folder / "events.jsonl").read_text().splitlines()]
    ending = ["evaluated", "run ended"]
    assert events == ["evaluated", "run started", *ending, "run extended", *ending], "a step is no event"


async def test_nothing_is_admitted_before_the_initial_evaluation_is_in(bus: Bus, tmp_path: Path) -> None:
    run = settings(tmp_path, heldout=5, coordinator={"autostart": False})
    async with running(make(bus, run)) as parts:
        await Trainer(bus).start()

        async def asked() -> bool:
            return await bus.length(streams.EVAL_PROMPTS) == 5

        await until(asked)
        await Ledger(bus).transition(RunState.RUNNING, "started by hand", [RunState.CREATED])
        for _ in range(5):
            parts.admission.wake()
            await parts.monitor.view()
            assert await bus.length(streams.PROMPTS) == 0
        async with replicas(bus):

            async def admitted() -> bool:
                return (await Ledger(bus).status()).cursor > 0

            await until(admitted)


async def test_without_autostart_a_run_waits_to_be_started(bus: Bus, tmp_path: Path) -> None:
    run = settings(tmp_path, coordinator={"autostart": False})
    async with running(make(bus, run)) as parts:
        await Trainer(bus).start()
        await until(lambda: parts.lifecycle.gate_open)
        assert await state(bus) is RunState.CREATED
        assert (await parts.monitor.view()).cursor == 0


async def test_a_killed_coordinator_goes_on_from_the_bus_to_the_same_end(bus: Bus, tmp_path: Path) -> None:
    run = settings(tmp_path, steps=6, heldout=5)
    async with replicas(bus):
        trainer = Trainer(bus)
        async with running(make(bus, run)):
            await trainer.start()
            await trainer.step()
        for _ in range(4):
            async with running(make(bus, run)):  # each is killed
                await trainer.step()
        async with running(make(bus, run)) as parts:
            await trainer.step()
            await closes(parts)
        again = summary(run.run_folder)
        async with running(make(bus, run)) as parts:
            await closes(parts)
    assert summary(run.run_folder) == again  # a finished run stays unchanged
    steps = [json.loads(line)["step"] for line in (run.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert (again["steps"], again["samples"], again["state"]) == (6, 24, "finished")
    assert sum(again["counts"].values()) == again["groups_admitted"]


async def test_groups_that_no_step_needs_any_more_are_dropped_and_counted(bus: Bus, tmp_path: Path) -> None:
    run = settings(tmp_path, steps=1)
    async with running(make(bus, run)) as parts:
        trainer = await Trainer(bus).start()
        async with replicas(bus):

            async def scored() -> bool:
                return await bus.length(streams.EXPERIENCE) == 2

            await until(scored)
        for group_id in (2, 3, 4, 5):
            await bus.publish(streams.PROMPTS, builders.prompt(group_id), str(group_id))
        await bus.read(streams.PROMPTS, Prompt, "rollout-1", 2, None)  # two of them held by a replica
        await trainer.step()
        await closes(parts)
    assert await bus.counts() == summary(run.run_folder)["counts"] == {"trained": 2, "dropped:run_ended": 4}
    assert await Ledger(bus).in_flight() == 0


async def test_groups_in_hand_are_taken_and_their_late_results_go_nowhere(bus: Bus) -> None:
    for place in range(3):
        await bus.append(streams.PROMPTS, {"id": str(place), "data": b"x"})
    await bus.append(streams.ROLLOUTS, {"id": "3", "data": b"x"})
    await bus.append(streams.EXPERIENCE, {"id": "4", "data": b"x"})
    (held, _) = await bus.read(streams.PROMPTS, Prompt, "rollout", 2, 0.1)
    (batch,) = await bus.read(streams.EXPERIENCE, Experience, "trainer", 1, 0.1)
    assert await drain(bus) == 5
    assert await bus.counts() == {"dropped:run_ended": 5}
    assert not await bus.hand_over(held, streams.ROLLOUTS, Event(0.0, "", "", ""))
    assert not await bus.drop(batch, "stale")
    assert await Ledger(bus).in_flight() == 0


async def test_a_stop_ends_the_run_with_what_there_is(bus: Bus, tmp_path: Path) -> None:
    run = settings(tmp_path, steps=50, heldout=5)
    async with running(make(bus, run)) as parts, replicas(bus):
        trainer = await Trainer(bus).start()
        await trainer.step()
        await parts.api.ledger.transition(RunState.STOPPED, "enough", [RunState.RUNNING])
        await closes(parts)
    summary_json = summary(run.run_folder)
    assert (summary_json["state"], summary_json["reason"], summary_json["steps"]) == ("stopped", "enough", 1)
    assert (summary_json["accuracy_before"], summary_json["counts"]["trained"]) == (1.0, 2)
    assert (
        sum(summary_json["counts"].values()) == summary_json["groups_admitted"] == (await Ledger(bus).status()).cursor
    )
    assert (run.run_folder / "report.html").exists()


async def test_the_end_waits_for_a_trainer_that_still_works(bus: Bus, tmp_path: Path) -> None:
    run = settings(tmp_path, steps=1, bus={"drain_s": PATIENCE_S})
    working, stop = Status(state="working"), asyncio.Event()
    beating = asyncio.create_task(Presence(bus, "trainer", "trainer-0", 0.5, working).run(stop))
    async with running(make(bus, run)) as parts, replicas(bus):
        trainer = await Trainer(bus).start()
        await trainer.step()
        await until(lambda: _does(parts, "ending: waiting for the trainer"))
        assert not (run.run_folder / "summary.json").exists()
        working.state = "waiting"  # the final policy is written
        await closes(parts)
    stop.set()
    await beating
    assert await state(bus) is RunState.FINISHED


async def test_a_stop_drops_nothing_under_a_step_that_a_trainer_makes(bus: Bus, tmp_path: Path) -> None:
    run = settings(tmp_path, steps=50, bus={"drain_s": 0.1})
    working, stop = Status(state="working"), asyncio.Event()
    beating = asyncio.create_task(Presence(bus, "trainer", "trainer-0", 0.5, working).run(stop))
    async with running(make(bus, run)) as parts, replicas(bus):
        trainer = await Trainer(bus).start()
        await trainer.step()
        await Ledger(bus).transition(RunState.STOPPED, "enough", [RunState.RUNNING])
        await until(lambda: _does(parts, "ending: waiting for the trainer"))
        await asyncio.sleep(1.0)  # ten times drain_s
        assert await trainer.step() == 2
        working.state = "waiting"
        await closes(parts)
    stop.set()
    await beating
    assert (await Ledger(bus).status()).step == 2


async def test_a_stop_waits_for_a_noted_batch_of_a_trainer_that_is_silent(bus: Bus, tmp_path: Path) -> None:
    run = settings(tmp_path, steps=50, bus={"drain_s": PATIENCE_S})
    async with running(make(bus, run)) as parts, replicas(bus):
        trainer = await Trainer(bus).start()  # without heartbeats, as after a failover that refused them
        await trainer.step()
        batch = await trainer.take()
        await Ledger(bus).transition(RunState.STOPPED, "enough", [RunState.RUNNING])
        await until(lambda: _does(parts, "ending: waiting for the trainer"))
        await asyncio.sleep(0.5)
        assert await trainer.commit(batch) == 2
        await closes(parts)
    assert (await Ledger(bus).status()).step == 2


async def test_a_rollback_that_is_accepted_while_the_run_ends_keeps_it_from_ending(bus: Bus, tmp_path: Path) -> None:
    run = settings(tmp_path, steps=2, bus={"drain_s": PATIENCE_S})
    working, stop = Status(state="working"), asyncio.Event()
    beating = asyncio.create_task(Presence(bus, "trainer", "trainer-0", 0.5, working).run(stop))
    async with running(make(bus, run)) as parts, replicas(bus), replica(bus, 3):
        trainer = await Trainer(bus).start()
        for _ in range(2):
            await trainer.step()
        await Ledger(bus).set_checkpoint(PolicyVersion(1), "/checkpoints/step-000001")
        await until(lambda: _does(parts, "ending: waiting for the trainer"))
        await Ledger(bus).note_policy(2)
        await Ledger(bus).note_missing("checkpoint", "a full disk")
        await parts.rollbacks.begin(PolicyVersion(1), "too late?")
        await until(lambda: _ends_no_more(bus))
        working.state = "waiting"
        await _load_and_publish(bus)
        await reaches(bus, RunState.RUNNING)
        assert not (run.run_folder / "summary.json").exists()
        status = await Ledger(bus).status()
        assert (status.state, status.step, status.closed) == (RunState.RUNNING, 1, False)
        assert (status.policy_step, status.missing) == (None, {}), "of the branch that was left"
        await (await trainer.start()).step()
        await closes(parts)
    stop.set()
    await beating
    assert await state(bus) is RunState.FINISHED


async def _ends_no_more(bus: Bus) -> bool:
    return (await Ledger(bus).status()).doing == ""


async def test_a_run_that_was_rolled_back_is_not_marked_as_finished(bus: Bus, tmp_path: Path) -> None:
    ledger = Ledger(bus)
    await ledger.create()
    await ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    await raw(bus).hset(bus.keys.named("run"), "step", 3)
    assert await ledger.transition(RunState.FINISHED, "", [RunState.RUNNING], 4) == (False, RunState.RUNNING)
    assert await ledger.transition(RunState.FINISHED, "", [RunState.RUNNING], 3) == (True, RunState.RUNNING)


async def _does(parts: Coordinator, activity: str) -> bool:
    return (await parts.monitor.view()).activity == activity


async def test_a_coordinator_that_does_not_lead_says_what_the_one_that_leads_does_and_when_the_run_is_closed(
    bus: Bus, tmp_path: Path
) -> None:
    run = settings(tmp_path, steps=1, heldout=5)
    follower = make(bus, run)
    async with running(make(bus, run)) as parts:
        trainer = await Trainer(bus).start()
        await until(lambda: _does(follower, "evaluating version 0: 0 of 5 problems have answers"))
        assert not (await follower.monitor.view()).closed
        async with replicas(bus):
            await trainer.step()
            await closes(parts)
    follower.monitor.forget()
    view = await follower.monitor.view()
    assert (view.closed, view.activity) == (True, "finished")


async def test_a_stop_interrupts_the_initial_evaluation(bus: Bus, tmp_path: Path) -> None:
    run = settings(tmp_path, heldout=5)
    async with running(make(bus, run)) as parts:
        await Trainer(bus).start()

        async def asked() -> bool:
            return await bus.length(streams.EVAL_PROMPTS) == 5

        await until(asked)
        await parts.api.ledger.transition(RunState.STOPPED, "", [RunState.CREATED, RunState.RUNNING])
        await closes(parts)
    summary_json = summary(run.run_folder)
    assert (summary_json["accuracy_before"], summary_json["groups_admitted"], summary_json["training_s"]) == (
        None,
        0,
        0.0,
    )


async def test_a_paused_run_neither_evaluates_nor_ends_until_it_is_resumed(bus: Bus, tmp_path: Path) -> None:
    run = settings(tmp_path, steps=1, heldout=5)
    async with running(make(bus, run)) as parts, replicas(bus):
        trainer = await Trainer(bus).start()
        await reaches(bus, RunState.RUNNING)

        async def scored() -> bool:
            return await bus.length(streams.EXPERIENCE) == 2

        await until(scored)
        await parts.api.ledger.transition(RunState.PAUSED, "", [RunState.RUNNING])
        await trainer.step()
        for _ in range(10):
            assert await parts.lifecycle.advance() is False
        assert await state(bus) is RunState.PAUSED
        await parts.api.ledger.transition(RunState.RUNNING, "", [RunState.PAUSED])
        await closes(parts)
    assert await state(bus) is RunState.FINISHED


async def test_a_run_whose_evaluation_fails_still_trains(bus: Bus, tmp_path: Path) -> None:
    run = settings(tmp_path, steps=1, heldout=5, evaluation={"timeout_s": 0.05})
    async with running(make(bus, run)) as parts, replicas(bus, evaluating=False):
        trainer = await Trainer(bus).start()
        await trainer.step()
        await closes(parts)
    summary_json = summary(run.run_folder)
    assert (summary_json["accuracy_before"], summary_json["accuracy_after"], summary_json["state"]) == (
        None,
        None,
        "finished",
    )


async def test_a_server_that_comes_back_empty_gets_its_run_back(bus: Bus, tmp_path: Path) -> None:
    run = settings(tmp_path)
    async with running(make(bus, run)):
        await reaches(bus, RunState.CREATED)
        await raw(bus).delete(bus.keys.named("run"))

        async def there() -> bool:
            return bool(await raw(bus).hexists(bus.keys.named("run"), "state"))

        await until(there)
    assert asyncio.current_task() is not None


async def test_a_paused_run_whose_server_comes_back_empty_is_paused_and_offered_what_it_had(
    bus: Bus, tmp_path: Path
) -> None:
    parts, offers = make(bus, settings(tmp_path)), []

    async def offer() -> None:
        offers.append(await bus.counts())

    parts.lifecycle._offer = offer
    async with running(parts):
        await Trainer(bus).start()
        await reaches(bus, RunState.RUNNING)
        await Ledger(bus).transition(RunState.PAUSED, "the reward is wrong", [RunState.RUNNING])
        await until(lambda: parts.lifecycle._seen is not None and parts.lifecycle._seen.state is RunState.PAUSED)
        before, offers_before = await Ledger(bus).status(), len(offers)
        await empty(bus)
        await reaches(bus, RunState.PAUSED)
        await Trainer(bus).start()

        async def created() -> bool:
            return (await Ledger(bus).status()).created_at_s > 0

        await until(created)
        await until(lambda: parts.lifecycle._seen is not None and parts.lifecycle._seen.head is not None)
        status = await Ledger(bus).status()
    assert (status.state, status.reason, status.created_at_s) == (
        RunState.PAUSED,
        "the reward is wrong",
        before.created_at_s,
    )
    assert len(offers) == offers_before + 1


async def test_a_paused_run_whose_bus_is_lost_while_it_is_stopped_is_paused_when_it_starts_again(
    bus: Bus, tmp_path: Path
) -> None:
    run, ledger = settings(tmp_path), Ledger(bus)
    async with running(make(bus, run)) as parts:
        await Trainer(bus).start()
        await reaches(bus, RunState.RUNNING)
        await ledger.transition(RunState.PAUSED, "guard reward: it is constant", [RunState.RUNNING])
        await until(lambda: parts.lifecycle._seen is not None and parts.lifecycle._seen.state is RunState.PAUSED)
        before = await ledger.status()
    await empty(bus)
    await create(ledger, run.run_folder)  # as every coordinator does at its start
    async with running(make(bus, run)) as parts:
        await reaches(bus, RunState.PAUSED)
        await Trainer(bus).start()
        await until(lambda: parts.lifecycle._seen is not None and parts.lifecycle._seen.head is not None)
        status = await ledger.status()
    assert (status.state, status.reason) == (RunState.PAUSED, "guard reward: it is constant")
    assert status.created_at_s == before.created_at_s
    await ledger.transition(RunState.RUNNING, "it was looked into", [RunState.PAUSED])
    await create(ledger, run.run_folder)
    assert await state(bus) is RunState.RUNNING, "the bus knows the run"


@pytest.mark.parametrize("text", ["", "[]", '{"state": "asleep"}', '{"paused_s": "long"}'])
def test_a_state_that_cannot_be_read_counts_as_none(tmp_path: Path, text: str) -> None:
    assert noted_state(tmp_path) is None
    (tmp_path / "run_state.json").write_text(text)
    assert noted_state(tmp_path) is None


async def test_a_pause_that_the_next_trainer_may_undo_is_not_noted(bus: Bus, tmp_path: Path) -> None:
    ledger = Ledger(bus)
    await ledger.create()
    for state, reason in ((RunState.RUNNING, "autostart"), (RunState.PAUSED, "the run cannot continue: no checkpoint")):
        await ledger.transition(state, reason, [RunState.CREATED, RunState.RUNNING])
        note_state(tmp_path, await ledger.status())
    noted = noted_state(tmp_path)
    assert noted is not None
    assert noted.state is RunState.RUNNING
