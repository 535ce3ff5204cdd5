"""Laws of operation: settings, drain, replicas, dead letters, versions."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.services.coordinator.api.app import make_app
from penstock.services.coordinator.schemas.resources import LiveChanges, LiveValues
from penstock.services.coordinator.service import Coordinator
from penstock.services.reward.service import make_scoring
from penstock.services.rollout.engines.scripted import ScriptedEngine
from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.manifests import CheckpointState
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Event, Experience, PolicyVersion, Prompt
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.cordon import Cordon, Word, tell_replica
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.stores.replicas.live_settings import CHANGEABLE, LIVE, Live
from penstock.shared.bus.worker import Patience, Worker
from penstock.shared.process.telemetry import Presence, Status
from penstock.shared.settings import Settings
from tests.conftest import PATIENCE_S, Server, until
from tests.support import builders
from tests.support.coordinator_players import Trainer, generating, make, replicas, running, settings
from tests.support.raw_redis import raw

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def parts(bus: Bus, tmp_path: Path) -> AsyncIterator[Coordinator]:
    await Ledger(bus).create()
    run = settings(tmp_path, steps=50, coordinator={"autostart": False}, algorithm={"groups_per_step": 2, "max_lag": 1})
    async with running(make(bus, run)) as running_parts:
        yield running_parts


@pytest.fixture
async def http(parts: Coordinator) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(parts.api))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def change(http: httpx.AsyncClient, etag: str, status: int = 200, **changes: Any) -> httpx.Response:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    body = {"changes": named, "reason": "a trial"}
    answer = await http.patch("/v1/run/settings", json=body, headers={"If-Match": etag})
    assert answer.status_code == status, answer.text
    return answer


async def ended(http: httpx.AsyncClient, location: str) -> dict[str, Any]:
    async def over() -> bool:
        return bool((await http.get(location)).json()["state"] != "running")

    await until(over)
    operation: dict[str, Any] = (await http.get(location)).json()
    return operation


def test_what_may_change_is_what_the_api_takes() -> None:
    for model in (LiveValues, LiveChanges):
        assert tuple(field.alias for field in model.model_fields.values()) == CHANGEABLE


async def test_settings_change_only_from_the_revision_that_was_read(http: httpx.AsyncClient, bus: Bus) -> None:
    before = await http.get("/v1/run/settings")
    assert (before.headers["etag"], before.json()["values"]["algorithm.max_lag"]) == ('"0"', 1)
    without = await http.patch("/v1/run/settings", json={"changes": {"algorithm.max_lag": 3}})
    assert without.status_code == 428
    after = await change(http, '"0"', algorithm__max_lag=3, trainer__learning_rate=2e-6)
    assert (after.headers["etag"], after.json()["values"]["algorithm.max_lag"]) == ('"1"', 3)
    assert after.json()["reason"] == "a trial"
    await change(http, '"0"', 412, algorithm__max_lag=4)
    again = await change(http, '"1"', sampling__temperature=0.5)
    values = again.json()["values"]
    assert (values["algorithm.max_lag"], values["trainer.learning_rate"], values["sampling.temperature"]) == (
        3,
        2e-6,
        0.5,
    )
    told = [event.fields["changes"] for _, event in await bus.newest(streams.EVENTS, Event, 2)]
    assert told == [{"sampling.temperature": 0.5}, {"algorithm.max_lag": 3, "trainer.learning_rate": 2e-6}]
    history = (await http.get("/v1/run/settings/history")).json()["items"]
    assert [(record["revision"], record["changes"]) for record in history] == [
        (2, {"sampling.temperature": 0.5}),
        (1, {"algorithm.max_lag": 3, "trainer.learning_rate": 2e-6}),
    ]


async def test_wrong_changes_are_refused_whole(http: httpx.AsyncClient) -> None:
    for changes, words in (
        ({"sampling__group_size": 1}, "greater than or equal to 2"),
        ({"run__steps": 9}, "Extra inputs"),
        ({"reward__expression": "anser"}, "expected the name of a scorer (answer)"),
        (
            {"sampling__group_size": 9},
            "expected sampling.group_size of at most 8 during the run (4 times that of its file), found 9",
        ),
        ({"sampling__group_size": 65_536}, "less than or equal to 4096"),
        (
            {"algorithm__max_lag": 32},
            "expected at most 128 samples in flight during the run (16 times those of its file), found 132",
        ),
        ({"algorithm__max_lag": 8, "sampling__group_size": 8}, "found 144"),
        ({"algorithm__max_lag": 999_999}, "expected at most 1,000,000 groups in flight"),
        ({}, "changes must name at least one setting"),
    ):
        assert words in (await change(http, '"0"', 422, **changes)).json()["detail"]
    assert (await http.get("/v1/run/settings")).json()["revision"] == 0


async def test_admission_follows_slots_group_size_and_temperature(http: httpx.AsyncClient, bus: Bus) -> None:
    await Trainer(bus).start()
    await http.post("/v1/run/start")

    async def count(expected: int) -> None:
        async def there() -> bool:
            return len(await generating(bus)) == expected

        await until(there)

    await count(4)  # (max_lag 1 + 1) × 2 groups
    await change(http, '"0"', algorithm__max_lag=3, sampling__group_size=6, sampling__temperature=0.5)
    await count(8)
    drawn = [(prompt.sampling.samples, prompt.sampling.temperature) for prompt in await generating(bus)]
    assert drawn == [(2, 1.0)] * 4 + [(6, 0.5)] * 4
    assert (await http.get("/v1/run")).json()["slots"] == 8


async def test_a_service_learns_of_changes_and_what_they_mean_for_it(bus: Bus) -> None:
    file = Settings.model_validate({"reward": {"scorers": [{"kind": "answer", "mode": "exact"}]}})
    writer, reader = Live(bus, file), Live(bus, file)
    scoring, engine = make_scoring(file, Status()), ScriptedEngine()
    reader.listen(scoring.reward_by)
    reader.listen(lambda now: engine.update_by(now.weights.update))
    await scoring.start()
    before = await scoring(builders.group(0, ("46", "47")))
    assert await writer.change(0, {"reward.expression": "2 * answer - 1", "weights.update": "drain"}, "") is not None
    await reader.refresh()
    after = await scoring(builders.group(0, ("46", "47")))
    await scoring.close()
    assert (before.rewards.tolist(), after.rewards.tolist()) == ([1.0, 0.0], [1.0, -1.0])
    assert (engine.update, reader.revision) == ("drain", 1)
    assert (await reader.at(0)).reward.expression == ""


async def test_a_revision_on_the_bus_that_memory_cannot_hold_is_not_applied(bus: Bus) -> None:
    live = Live(bus, Settings())
    await live.restore(1, {"sampling.group_size": 4 * Settings().sampling.group_size})
    assert (await live.refresh()).sampling.group_size == 64
    await live.restore(2, {"sampling.group_size": 4000})
    assert (await live.refresh()).sampling.group_size == 64
    assert live.revision == 1


async def test_a_revision_that_overrides_the_file_of_a_resume_is_named_with_both_values(bus: Bus) -> None:
    assert await Live(bus, Settings()).kept() == []
    await Live(bus, Settings()).change(0, {"trainer.learning_rate": 3e-5, "algorithm.max_lag": 2}, "")
    resumed = Live(bus, Settings.model_validate({"trainer": {"learning_rate": 2e-5}, "algorithm": {"max_lag": 2}}))
    await resumed.refresh()
    assert await resumed.kept() == ["trainer.learning_rate is 3e-05, not 2e-05"]


async def test_settings_that_the_bus_lost_are_put_back_by_whoever_knows_them(bus: Bus) -> None:
    first, second = Live(bus, Settings()), Live(bus, Settings())
    assert await first.change(0, {"trainer.learning_rate": 1e-4}, "slower") is not None
    assert await first.change(1, {"trainer.learning_rate": 2e-4}, "faster") is not None
    await second.refresh()
    await raw(bus).delete(bus.keys.of(LIVE))
    await Live(bus, Settings()).restore(1, {"trainer.learning_rate": 1e-4})  # of a checkpoint from before the change
    await second.refresh()
    assert (second.revision, second.settings.trainer.learning_rate) == (2, 2e-4)
    third = Live(bus, Settings())
    await third.refresh()
    assert third.settings.trainer.learning_rate == 2e-4
    revision = await third.read(2)
    assert revision is not None
    assert revision.reason == "faster"
    await third.restore(1, {"trainer.learning_rate": 1e-4})
    assert await third.newest() == 2


async def test_two_changes_of_one_revision_are_one_change(bus: Bus) -> None:
    record, other = Live(bus, Settings()), Live(bus, Settings())
    made = await asyncio.gather(
        record.change(0, {"algorithm.max_lag": 2}, ""), other.change(0, {"algorithm.max_lag": 3}, "")
    )
    assert sorted(actual is None for actual in made) == [False, True]
    assert await record.newest() == 1


async def test_a_drained_pause_ends_when_nothing_is_generated_or_scored(http: httpx.AsyncClient, bus: Bus) -> None:
    trainer = await Trainer(bus).start()
    await http.post("/v1/run/start")
    await until(lambda: bus.length(streams.PROMPTS))
    answer = await http.post("/v1/run/pause", json={"mode": "drain"})
    assert (answer.status_code, answer.json()["state"], answer.json()["kind"]) == (202, "running", "pause")
    repeated = await http.post("/v1/run/pause", json={"mode": "drain"})
    assert repeated.json()["id"] == answer.json()["id"]
    async with replicas(bus):
        await trainer.step()
        await trainer.step()
        done = await ended(http, answer.headers["location"])
    assert (done["state"], done["result"]) == ("succeeded", {"step": 2, "groups_waiting": 0})


async def test_a_run_that_goes_on_cancels_its_drain(http: httpx.AsyncClient, bus: Bus) -> None:
    await Trainer(bus).start()
    await http.post("/v1/run/start")
    await until(lambda: bus.length(streams.PROMPTS))
    answer = await http.post("/v1/run/pause", json={"mode": "drain"})
    await http.post("/v1/run/resume")
    assert (await ended(http, answer.headers["location"]))["state"] == "cancelled"


async def test_a_cordoned_worker_finishes_what_it_holds_and_takes_nothing_new(bus: Bus) -> None:
    go, stop, handled = asyncio.Event(), asyncio.Event(), []

    async def handle(prompt: Prompt) -> Prompt:
        await go.wait()
        handled.append(int(prompt.group_id))
        return prompt

    left: list[bool] = []
    cordon = Cordon(bus, "rollout-0", lambda: left.append(True))
    patience = Patience(claim_after_s=PATIENCE_S, drain_s=1.0)
    worker = Worker(
        bus, "rollout-0", streams.PROMPTS, Prompt, streams.ROLLOUTS, handle, 8, patience, taking=cordon.taking
    )
    working = asyncio.create_task(worker.run(stop))
    await bus.append(streams.PROMPTS, {"id": "0", "data": wire.encode(builders.prompt(0))})
    await until(lambda: worker.held == 1)
    await tell_replica(bus, "rollout-0", Word.CORDONED)
    await cordon.refresh()
    await until(lambda: worker.resting)
    await bus.append(streams.PROMPTS, {"id": "1", "data": wire.encode(builders.prompt(1))})
    go.set()
    await until(lambda: worker.held == 0)
    assert (handled, await bus.length(streams.PROMPTS), left) == ([0], 1, [])
    await tell_replica(bus, "rollout-0", Word.DRAINING)
    await cordon.refresh()
    assert left == [True]
    fresh = Cordon(bus, "rollout-0", lambda: left.append(False))
    await fresh.begin()
    await fresh.refresh()
    assert (fresh.taking.is_set(), left) == (True, [True])  # a new process under that name takes work
    stop.set()
    await working


async def test_replicas_are_cordoned_over_http(http: httpx.AsyncClient, bus: Bus) -> None:
    stop = asyncio.Event()
    states = {"rollout-0": "rollout", "trainer-0": "trainer"}
    beats = [
        asyncio.create_task(Presence(bus, service, name, 30.0, Status(state="working")).run(stop))
        for name, service in states.items()
    ]
    await until(lambda: _beating(bus, 2))
    told = (await http.post("/v1/services/rollout-0/cordon", json={"reason": "a new disk"})).json()
    assert told == {"replica": "rollout-0", "cordon": "cordoned", "changed": True}
    assert (await http.post("/v1/services/rollout-0/cordon")).json()["changed"] is False
    assert (await http.get("/v1/services/rollout-0")).json()["cordon"] == "cordoned"
    assert (await http.post("/v1/services/rollout-0/uncordon")).json()["cordon"] is None
    assert (await http.post("/v1/services/trainer-0/cordon")).status_code == 409
    assert (await http.post("/v1/services/nobody/drain")).status_code == 404
    stop.set()
    await asyncio.gather(*beats)


async def _beating(bus: Bus, count: int) -> bool:
    return len(await heartbeats(bus)) == count


async def test_a_drained_replica_leaves_with_exit_code_0(
    http: httpx.AsyncClient, server: Server, bus: Bus, tmp_path: Path
) -> None:
    config = tmp_path / "reward.toml"
    config.write_text(
        f'[run]\nid = "{bus.run_id}"\n[bus]\nurl = "{server.url}"\ndrain_s = 1\n[internal]\nheartbeat_s = 0.5\n'
        '[[reward.scorers]]\nkind = "random"\n'
    )
    command = [sys.executable, "-m", "penstock.services.reward", "--config", str(config), "--replica", "reward-9"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        answers: list[httpx.Response] = []

        async def is_draining() -> bool:
            answers.append(await http.post("/v1/services/reward-9/drain"))
            assert answers[-1].status_code in (202, 404), answers[-1].text
            return answers[-1].status_code == 202  # not while its heartbeats are missing, as on a busy machine

        await until(is_draining)
        _, error = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
        assert process.returncode == 0, error
        assert (await ended(http, answers[-1].headers["location"]))["state"] == "succeeded"
    finally:
        process.kill()


async def test_a_dead_letter_is_read_requeued_and_discarded_and_the_audit_stays_exact(
    http: httpx.AsyncClient, bus: Bus
) -> None:
    for number in range(3):
        await bus.publish(streams.PROMPTS, builders.prompt(number), str(number))
    for delivery in await bus.read(streams.PROMPTS, Prompt, "test", 3, 1.0):
        await bus.bury(delivery, "poison")

    async def audit() -> tuple[int, int, int]:
        counts = await bus.counts()
        return counts.get("dead:prompts", 0), counts.get("dropped:discarded", 0), await bus.length(streams.PROMPTS)

    first = (await http.get("/v1/dead-letters", params={"limit": 2})).json()
    second = (await http.get("/v1/dead-letters", params={"limit": 2, "cursor": first["next"]})).json()
    letters = first["items"] + second["items"]
    assert [(record["stream"], record["group"], record["reason"], record["attempts"]) for record in letters] == [
        ("prompts", "0", "poison", 1), ("prompts", "1", "poison", 1), ("prompts", "2", "poison", 1),
    ]  # fmt: skip
    path = f"/v1/dead-letters/prompts/{letters[0]['entry']}"
    shown = (await http.get(path)).json()
    assert (shown["message"]["group_id"], shown["unreadable"]) == (0, "")
    assert await audit() == (3, 0, 0)
    assert (await http.post(f"{path}/requeue")).json()["outcome"] == "requeued"
    assert (await http.post(f"{path}/requeue")).status_code == 404
    assert await audit() == (2, 0, 1)
    await http.post(f"/v1/dead-letters/prompts/{letters[1]['entry']}/discard", json={"reason": "known"})
    assert await audit() == (1, 1, 1)
    assert (await http.get("/v1/run")).json()["dead"] == 1


async def test_a_dead_letter_of_a_run_that_ended_stays(http: httpx.AsyncClient, bus: Bus) -> None:
    await bus.publish(streams.EXPERIENCE, builders.experience(0, (1.0, 0.0)), "0")
    (delivery,) = await bus.read(streams.EXPERIENCE, Experience, "test", 1, 1.0)
    await bus.bury(delivery, "poison")
    await http.post("/v1/run/stop")
    (letter,) = (await http.get("/v1/dead-letters")).json()["items"]
    path = f"/v1/dead-letters/experience/{letter['entry']}"
    assert (await http.get(path)).json()["message"]["rewards"] == {"shape": [2], "elements": [1.0, 0.0]}
    assert (await http.post(f"{path}/requeue")).status_code == 409


async def test_versions_are_compared_pinned_and_released(http: httpx.AsyncClient, bus: Bus) -> None:
    async with replicas(bus):
        trainer = await Trainer(bus).start()
        await http.post("/v1/run/start")
        await trainer.step()
        await trainer.step()
    answer = (await http.get("/v1/policies/1/compare/2")).json()
    assert (answer["ancestor"], answer["left_steps"], answer["right_steps"]) == (1, 0, 1)
    assert answer["metrics"]["reward_mean"] == {"left": 0.5, "right": 0.5, "change": 0.0}
    assert (await http.post("/v1/policies/2/pin")).status_code == 409
    await Ledger(bus).set_checkpoint(PolicyVersion(2), "/checkpoints/step-000002")
    pinned = {"version": 2, "pinned": True, "released": False, "changed": True}
    assert (await http.post("/v1/policies/2/pin")).json() == pinned
    assert (await http.post("/v1/policies/2/release")).json() == {**pinned, "released": True}
    assert (await http.post("/v1/policies/2/unpin")).json() == {**pinned, "pinned": False, "released": True}
    shown = (await http.get("/v1/policies", params={"limit": 1, "cursor": "1"})).json()["items"]
    assert [(record["version"], record["released"]) for record in shown] == [(2, True)]


async def test_cleanup_leaves_the_newest_checkpoints_and_the_pinned_ones(bus: Bus, tmp_path: Path) -> None:
    ledger = Ledger(bus)
    for step in (1, 2, 3, 4):
        folder = local_store.beside(tmp_path, step)
        folder.mkdir(parents=True)
        made = local_store.make_whole(tmp_path, CheckpointState(step, PolicyVersion(10 * step), 0, "", 1, 0, "00"))
        await ledger.set_checkpoint(made.state.version, str(made.folder))
    await ledger.pin(PolicyVersion(20), pinned=True)
    for old in local_store.superfluous(tmp_path, 1):
        if await ledger.forget_checkpoint(str(old.folder)):
            local_store.delete(old)
    assert [record.state.step for record in local_store.find(tmp_path)] == [2, 4]
    assert sorted(await ledger.checkpoints()) == [20, 40]


async def test_events_are_listed_newest_first_and_streamed_from_where_one_was(
    http: httpx.AsyncClient, bus: Bus
) -> None:
    for name in ("start", "pause"):
        await http.post(f"/v1/run/{name}")
    await http.post("/v1/run/resume", json={"reason": "see http://a/?key=secret"})
    listed = (await http.get("/v1/events", params={"limit": 2})).json()
    assert [event["name"] for event in listed["items"]] == ["run resumed", "run paused"]
    seen = {"Last-Event-ID": listed["next"], "Accept": "text/event-stream"}
    streamed = await http.get("/v1/events/stream", params={"for_s": 0.2}, headers=seen)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    newest, lines = listed["items"][0], streamed.text.splitlines()
    assert lines[2:4] == [f"id: {newest['id']}", "event: run_resumed"]
    assert json.loads(lines[4].removeprefix("data: ")) == newest
    assert newest["detail"].endswith("see http://a/?key=***"), "secrets of addresses are hidden in both"


async def test_a_registered_run_is_found_by_services_that_start_from_the_bus(
    http: httpx.AsyncClient, server: Server, bus: Bus
) -> None:
    run_id = f"{bus.run_id}-b"
    toml = f'[run]\nid = "{run_id}"\nsteps = 7\n[policy]\nmodel = "none"\n'
    kind = {"Content-Type": "application/toml"}
    wrong = await http.post("/v1/runs", content="[run]\nsteps = 0\n[trainer]\nlearnin_rate = 1\n", headers=kind)
    assert (wrong.status_code, len(wrong.json()["errors"])) == (422, 2)
    assert "did you mean 'learning_rate'?" in wrong.json()["detail"]
    made = await http.post("/v1/runs", content=toml, headers=kind)
    assert (made.status_code, made.headers["location"]) == (201, f"/v1/runs/{run_id}")
    assert (made.json()["state"], made.json()["registered"], made.json()["here"]) == ("created", True, False)
    taken = await http.post("/v1/runs", content=toml.replace("steps = 7", "steps = 8"), headers=kind)
    assert taken.status_code == 409
    listed = (await http.get("/v1/runs", params={"limit": 500})).json()["items"]
    assert {run_id, bus.run_id} <= {run["run_id"] for run in listed}
    program = "import sys; from penstock.shared.process.service import parse; s, _ = parse('reward', sys.argv[1:]); print(s.run.steps, s.bus.url)"
    command = [sys.executable, "-c", program, "--from-bus", server.url, "--run-id", run_id]
    shown = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True)
    assert (shown.stdout, shown.returncode) == (f"7 {server.url}\n", 0), shown.stderr
