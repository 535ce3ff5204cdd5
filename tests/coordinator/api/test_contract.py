"""The contract of the HTTP API and the coordinator's process."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import REGISTRY, generate_latest

from penstock.services.coordinator.api.app import make_app
from penstock.services.coordinator.service import Coordinator
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.streams import HISTORY
from penstock.shared.errors import SettingsError
from penstock.shared.process.telemetry import Presence, Status
from penstock.shared.settings import dump
from tests.conftest import PATIENCE_S, Server, until
from tests.support.coordinator_players import Trainer, make, replicas, running, settings
from tests.support.raw_redis import raw


@pytest.fixture
async def parts(bus: Bus, tmp_path: Path) -> AsyncIterator[Coordinator]:
    await Ledger(bus).create()
    async with running(make(bus, settings(tmp_path, steps=50, coordinator={"autostart": False}))) as running_parts:
        yield running_parts


@pytest.fixture
async def http(parts: Coordinator) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(parts.api))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def is_problem(answer: httpx.Response, status: int, words: str) -> bool:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert answer.json()["status"] == status
    assert words in answer.json()["detail"]
    return True


async def command(http: httpx.AsyncClient, name: str, status: int = 200) -> dict[str, object]:
    answer = await http.post(f"/v1/run/{name}")
    assert answer.status_code == status
    body: dict[str, object] = answer.json()
    return body


RUN_FIELDS = {
    *(
        "run_id",
        "state",
        "reason",
        "closed",
        "recorded",
        "activity",
        "bus_full",
        "step",
        "steps",
        "head",
        "newest_version",
    ),
    *("groups_in_flight", "slots", "cursor", "streams", "counts", "dead", "last", "lag_counts", "history"),
    *(
        "evaluations",
        "tokens_per_s",
        "drawn_tokens_per_s",
        "started_at_s",
        "training_s",
        "eta_s",
        "gpu_hours",
        "bus",
        "guards",
        "notices",
    ),
    *("settings_revision", "self_tests", "bound"),
}


async def test_the_run_says_how_the_trainers_self_tests_went(http: httpx.AsyncClient, bus: Bus) -> None:
    assert (await http.get("/v1/run")).json()["self_tests"] == {}
    await Ledger(bus).note_self_test("policy", "an older start's")
    await Ledger(bus).note_self_test("policy", 'logprobs differ by 5.7e-06 nats at most; packing = "rows"')
    await Ledger(bus).note_self_test("critic", "hidden states differ by 1e-06 at most")

    async def is_shown() -> bool:
        shown: dict[str, str] = (await http.get("/v1/run")).json()["self_tests"]
        return shown == {
            "critic": "hidden states differ by 1e-06 at most",
            "policy": 'logprobs differ by 5.7e-06 nats at most; packing = "rows"',
        }

    await until(is_shown)


async def test_the_run_has_the_names_that_its_readers_know(http: httpx.AsyncClient, bus: Bus) -> None:
    answer = (await http.get("/v1/run")).json()
    assert set(answer) == RUN_FIELDS
    assert (answer["state"], answer["step"], answer["steps"], answer["slots"], answer["head"]) == (
        "created",
        0,
        50,
        4,
        None,
    )
    assert set(answer["streams"]) == {"prompts", "episodes", "rollouts", "experience", "journal"}
    assert set(answer["streams"]["prompts"]) == {"entries", "pending", "oldest_age_s"}
    assert answer["activity"] == "waiting for version 0"
    assert answer["bus"] == bus.server
    assert answer["run_id"] == bus.run_id


async def test_the_run_shows_its_newest_step(http: httpx.AsyncClient, bus: Bus, parts: Coordinator) -> None:
    async with replicas(bus):
        trainer = await Trainer(bus).start()
        await command(http, "start")
        for _ in range(3):
            await trainer.step()
        parts.monitor.forget()
        answer = (await http.get("/v1/run")).json()
    assert (answer["step"], answer["state"], answer["activity"]) == (3, "running", "training")
    assert answer["history"] == {"step": [1, 2, 3], "reward_mean": [0.1, 0.2, 0.3], "tokens_per_s": [50.0] * 3}
    assert (answer["last"]["reward_mean"], answer["last"]["kl_max"], answer["tokens_per_s"]) == (0.3, None, 50.0)
    assert answer["lag_counts"] == {"0": 3, "1": 1}
    assert answer["eta_s"] == 47.0  # one second a step
    assert answer["counts"]["trained"] == 6
    assert answer["streams"]["journal"]["entries"] == 6
    await command(http, "pause")
    answer = (await http.get("/v1/run")).json()
    assert (answer["tokens_per_s"], answer["last"]["tokens_per_s"], answer["reason"]) == (0.0, 50.0, "on request")


async def test_commands_lead_from_state_to_state_and_repeating_one_changes_nothing(
    http: httpx.AsyncClient, bus: Bus
) -> None:
    done = []
    for name in ("start", "start", "pause", "pause", "resume", "resume", "stop", "stop"):
        answer = await command(http, name)
        done.append((answer["state"], answer["changed"]))
    assert done == [
        ("running", True), ("running", False), ("paused", True), ("paused", False),
        ("running", True), ("running", False), ("stopped", True), ("stopped", False),
    ]  # fmt: skip


async def test_commands_that_do_not_fit_are_conflicts_with_a_sentence(http: httpx.AsyncClient) -> None:
    assert is_problem(await http.post("/v1/run/pause"), 409, "the run has not started; there is nothing to pause")
    assert is_problem(await http.post("/v1/run/resume"), 409, "POST /v1/run/start")
    await command(http, "start")
    await command(http, "pause")
    assert is_problem(await http.post("/v1/run/start"), 409, "the run is paused: POST /v1/run/resume")
    await command(http, "stop")
    for name in ("start", "pause", "resume"):
        assert is_problem(await http.post(f"/v1/run/{name}"), 409, "a run that is stopped: the run was stopped")


async def test_a_pause_keeps_its_reason(http: httpx.AsyncClient, parts: Coordinator) -> None:
    await command(http, "start")
    answer = await http.post("/v1/run/pause", json={"reason": "kl over the ceiling"})
    assert answer.json() == {"state": "paused", "changed": True, "reason": "on request: kl over the ceiling"}
    assert (await http.get("/v1/run")).json()["reason"] == "on request: kl over the ceiling"


async def test_after_pause_answers_the_cursor_stands_still(http: httpx.AsyncClient, bus: Bus) -> None:
    async with replicas(bus):
        trainer = await Trainer(bus).start()
        await command(http, "start")
        await trainer.step()
        await command(http, "pause")
        paused_at = (await Ledger(bus).status()).cursor
        await trainer.step()
        assert (await Ledger(bus).status()).cursor == paused_at
        await command(http, "resume")
        await trainer.step()

        async def goes_on() -> bool:
            return (await Ledger(bus).status()).cursor > paused_at

        await until(goes_on)


async def test_wrong_requests_are_problems(http: httpx.AsyncClient) -> None:
    assert is_problem(await http.get("/v1/policies/x"), 422, "path.version")
    assert is_problem(await http.get("/v1/policies/-1"), 422, "path.version")
    assert is_problem(await http.post("/v1/run/pause", json={"reasn": "typo"}), 422, "reasn")
    assert is_problem(
        await http.post("/v1/run/pause", content=b"{", headers={"content-type": "application/json"}), 422, "JSON"
    )
    assert is_problem(await http.get("/v1/nothing"), 404, "found GET /v1/nothing")
    assert is_problem(await http.put("/v1/run"), 405, "found PUT /v1/run")


async def test_states_that_no_process_of_the_run_wrote_are_left_out_of_its_history(
    http: httpx.AsyncClient, bus: Bus
) -> None:
    await bus.append(HISTORY, {"data": "?"})
    await bus.append(HISTORY, {"at_s": "1", "from": "", "to": "?", "reason": "", "step": "0"})
    await bus.append(HISTORY, {"at_s": "2", "from": "", "to": "running", "reason": "mine", "step": "0"})
    pages = [(await http.get("/v1/run/history", params={"limit": 2})).json()]
    pages.append((await http.get("/v1/run/history", params={"limit": 2, "cursor": pages[0]["next"]})).json())
    assert [[state["reason"] for state in page["items"]] for page in pages] == [["mine"], []]


async def test_the_policy_has_a_history(http: httpx.AsyncClient, bus: Bus) -> None:
    async with replicas(bus):
        trainer = await Trainer(bus).start()
        await command(http, "start")
        await trainer.step()
    await Ledger(bus).set_checkpoint(1, "/checkpoints/step-000001")  # type: ignore[arg-type]

    async def live() -> bool:
        return (await Ledger(bus).status()).head == 1

    await until(live)
    first, second = (await http.get("/v1/policies")).json()["items"]
    assert (first["version"], first["parent"], first["state"], first["checkpoint"]) == (0, None, "retired", None)
    assert (second["version"], second["parent"], second["step"], second["state"]) == (1, 0, 1, "live")
    assert (second["checkpoint"], second["location"]) == ("/checkpoints/step-000001", "/snapshots/1")
    assert (await http.get("/v1/policies/1")).json() == second
    assert is_problem(
        await http.get("/v1/policies/7"), 404, "this run has no policy version 7; it has versions up to 1"
    )


async def test_replicas_that_beat_are_there(http: httpx.AsyncClient, bus: Bus) -> None:
    presence = Presence(bus, "rollout", "rollout-0", 5.0, Status(state="working", address="h:1", values={"held": 2.0}))
    stop = asyncio.Event()
    beating = asyncio.create_task(presence.run(stop))

    async def there() -> bool:
        return bool((await http.get("/v1/services")).json()["items"])

    await until(there)
    (replica,) = (await http.get("/v1/services")).json()["items"]
    assert (replica["service"], replica["replica"], replica["state"], replica["version"]) == (
        "rollout",
        "rollout-0",
        "working",
        None,
    )
    assert (replica["address"], replica["values"]) == ("h:1", {"held": 2.0})
    stop.set()
    await beating


async def test_the_starts_of_a_replica_are_counted_over_its_processes(http: httpx.AsyncClient, bus: Bus) -> None:
    starts = []
    for _ in range(2):  # a killed process leaves its heartbeat until replaced
        killed = Presence(bus, "trainer", "trainer-0", 60.0, Status(state="working"))
        beating = asyncio.create_task(killed.run(asyncio.Event()))

        async def beats(since_s: float = killed._started_at_s) -> bool:
            return any(
                replica["started_at_s"] == since_s for replica in (await http.get("/v1/services")).json()["items"]
            )

        await until(beats)
        beating.cancel()
        starts.append((await http.get("/v1/services/trainer-0")).json()["starts"])
    assert starts == [1, 2]


async def test_a_replica_that_starts_again_after_it_died_is_an_event_and_one_that_left_in_order_is_none(
    http: httpx.AsyncClient, bus: Bus
) -> None:
    async def live(*, leaves: bool) -> None:
        presence, stop = Presence(bus, "trainer", "trainer-0", 5.0, Status(state="working")), asyncio.Event()
        starts = len(await raw(bus).smembers(bus.keys.named("starts:trainer-0")))  # before it counts its own
        beating = asyncio.create_task(presence.run(stop))
        await until(lambda: _started(bus, starts + 1))
        stop.set()
        await beating
        if leaves:
            await presence.leave()

    async def told() -> list[str]:
        return [
            item["detail"] for item in (await http.get("/v1/events")).json()["items"] if "restarted" in item["name"]
        ]

    await live(leaves=True)
    await live(leaves=False)
    assert await told() == []
    await live(leaves=True)
    detail = f"trainer-0 was started again after it had died: start 3, process {os.getpid()}"
    assert await told() == [detail]
    await live(leaves=True)
    assert await told() == [detail]


async def _started(bus: Bus, starts: int) -> bool:
    beats = await heartbeats(bus)
    return any(beat.starts == starts for beat in beats)


async def test_health_and_readiness_say_what_was_looked_at(http: httpx.AsyncClient, parts: Coordinator) -> None:
    assert (await http.get("/healthz")).json() == {"status": "ok"}
    assert (await http.get("/readyz")).json() == {
        "ready": True,
        "state": "working",
        "checks": {"bus": {"ok": True, "detail": "answers"}, "work": {"ok": True, "detail": "working"}},
    }
    parts.api.status.state = "starting"
    answer = await http.get("/readyz")
    assert (answer.status_code, answer.json()["checks"]["work"]) == (503, {"ok": False, "detail": "starting"})


async def test_the_monitor_sets_the_gauges(parts: Coordinator) -> None:
    def text() -> str:
        return generate_latest(REGISTRY).decode()

    expected = ['penstock_coordinator_run_state{state="created"} 1.0']
    for name in ("stream_entries", "stream_pending", "stream_oldest_age_seconds"):
        expected.append(f'penstock_coordinator_{name}{{stream="prompts"}}')
    for name in ("groups_in_flight", "slots", "head_version", "step", "admitted_total", "promote_seconds_count"):
        expected.append(f"\npenstock_coordinator_{name} ")
    expected.append("\npenstock_coordinator_dead_letters ")
    await until(lambda: all(line in text() for line in expected))


async def test_every_route_is_described(http: httpx.AsyncClient) -> None:
    described = (await http.get("/openapi.json")).json()["paths"]
    assert len(described) == 41
    assert all(operation["summary"] for path in described.values() for operation in path.values())


async def test_a_bus_that_does_not_answer_is_unavailable_not_a_hang(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.services.coordinator.api import dependencies as parts

    monkeypatch.setattr(parts, "ANSWER_WITHIN_S", 0.0)
    assert is_problem(await http.get("/v1/policies"), 503, "the bus did not answer")


def config(server: Server, folder: Path, **more: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    run = settings(folder, **more)  # type: ignore[arg-type]
    path = folder / "run.toml"
    dump(run.model_copy(update={"bus": run.bus.model_copy(update={"url": server.url})}), path)
    return path


def launch(path: Path, *flags: str) -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-m", "penstock.services.coordinator", "--config", str(path), *flags]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def refusal(path: Path, *flags: str) -> str:
    process = launch(path, *flags)
    output, error = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (2, "")
    assert "Traceback" not in error
    return error


async def test_a_process_serves_its_address_and_sigterm_ends_it_in_order(server: Server, tmp_path: Path) -> None:
    path = config(server, tmp_path / "a b", run={"id": f"process-{os.getpid()}"})
    process = launch(path)
    announced = tmp_path / "a b" / "runs" / f"process-{os.getpid()}" / "coordinator.json"
    try:
        await until(lambda: announced.exists() or process.poll() is not None)
        data = json.loads(announced.read_text())
        assert (data["pid"], data["run_id"]) == (process.pid, f"process-{os.getpid()}")
        async with httpx.AsyncClient(base_url=data["url"], timeout=PATIENCE_S) as client:
            assert (await client.get("/v1/run")).json()["state"] == "created"
            beats: list[dict[str, object]] = []

            async def beating() -> bool:
                beats[:] = (await client.get("/v1/services")).json()["items"]
                return len(beats) == 1

            await until(beating)
            (beat,) = beats
            assert (await client.get("/metrics")).status_code == 404
            metrics = await client.get(f"http://{beat['address']}/metrics")
            assert "penstock_coordinator_run_state" in metrics.text
            process.send_signal(signal.SIGTERM)
        _, error = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
        assert process.returncode == 0
        assert "Traceback" not in error
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_what_a_process_cannot_start_with_is_a_sentence(server: Server, tmp_path: Path) -> None:
    path = config(server, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = refusal(path, "--coordinator.port", str(port))
        assert f"the HTTP API cannot listen on 127.0.0.1:{port}" in words
        assert "change coordinator.port" in words
    (tmp_path / "file").touch()
    assert "change run.folder" in refusal(path, "--run.folder", str(tmp_path / "file"))
    assert "no dataset at no.jsonl: change evaluation.path" in refusal(path, "--evaluation.path", "no.jsonl")


def test_a_host_of_another_machine_is_refused() -> None:
    from penstock.services.coordinator.api.server import ApiServer as HttpServer

    with pytest.raises(SettingsError, match=r"change coordinator\.port"):
        HttpServer("192.0.2.1", 0)
