"""Exports over HTTP succeed beside the steps, despite kills, or fail with a reason."""

import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from penstock.services.cli.__main__ import main
from penstock.services.coordinator.api.app import make_app
from penstock.services.coordinator.api.auth import Access
from penstock.services.coordinator.operations.operations import Operations
from penstock.services.coordinator.policies.exports import Exporting
from penstock.services.coordinator.service import Coordinator
from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.export import exporter
from penstock.services.trainer.export.exporter import Exporter
from penstock.services.trainer.rank0.driver import Driver
from penstock.services.trainer.rank0.mailbox.queues import Mailbox
from penstock.services.trainer.rank0.mailbox.results import Saved
from penstock.services.up.process_tree import is_alive
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Event, PolicyVersion
from penstock.shared.bus.stores.policy.exports import Exports
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.cordon import Cordon
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.stores.replicas.place import Place
from penstock.shared.bus.stores.replicas.run_secret import RunSecret
from penstock.shared.bus.streams import EVENTS
from penstock.shared.process.service import Context
from penstock.shared.process.telemetry import Presence, Status
from tests.conftest import PATIENCE_S, Server, until
from tests.coordinator.api.test_page import served
from tests.support.children import children
from tests.support.coordinator_players import make, record, running, settings
from tests.support.driven import own_devices
from tests.support.raw_redis import raw
from tests.trainer.export.test_export import ROOT, Run, assert_is, loaded

pytestmark = pytest.mark.usefixtures("one_rank")

V = PolicyVersion


@pytest.fixture
async def parts(bus: Bus, tmp_path: Path) -> AsyncIterator[Coordinator]:
    """Pulled versions 0 to 4; 1 has a checkpoint, 2 is revoked, 4 is on disk."""
    ledger = Ledger(bus)
    await ledger.create()
    for version in range(5):
        made = record(version, version - 1 if version else None, 0)
        made = dataclasses.replace(made, location=made.location if version == 4 else "")
        await ledger.commit(await ledger.take_epoch(), made, [], None)
    await raw(bus).execute_command("SADD", bus.keys.named("revoked"), 2)
    async with running(make(bus, settings(tmp_path, coordinator={"autostart": False}))) as running_parts:
        yield running_parts


@pytest.fixture
async def http(parts: Coordinator) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(parts.api))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.fixture
async def run(bus: Bus, tmp_path: Path) -> Run:
    run = Run(tmp_path, 1, 0)
    await Ledger(bus).set_checkpoint(V(1), str(run.checkpoint()))
    return run


@contextlib.asynccontextmanager
async def trainer(bus: Bus, run: Run) -> AsyncIterator[None]:
    leave = asyncio.Event()
    beating = asyncio.create_task(Presence(bus, "trainer", "trainer-0", 0.2, Status(state="waiting")).run(leave))
    exporting = asyncio.create_task(Exporter(bus, run.settings).run())
    try:
        yield
    finally:
        exporting.cancel()
        await asyncio.gather(exporting, return_exceptions=True)
        leave.set()
        await beating


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes of exports begin and not end, however long the test takes to see them."""
    program = tmp_path / "unfinished"
    program.write_text("#!/bin/sh\nwhile :; do sleep 0.1; done\n")
    program.chmod(0o755)
    monkeypatch.setattr(exporter, "sys", SimpleNamespace(executable=str(program)))


def processes(parent: int | None = None) -> list[psutil.Process]:
    return children("penstock.services.trainer.export", parent)


async def operation(http: httpx.AsyncClient, number: int = 1) -> dict[str, Any]:
    record: dict[str, Any] = (await http.get(f"/v1/operations/{number}")).json()
    return record


async def ended(http: httpx.AsyncClient, number: int = 1) -> dict[str, Any]:
    async def over() -> bool:
        return bool((await operation(http, number))["state"] != "running")

    await until(over)
    return await operation(http, number)


_TRAINER = """
import asyncio, sys
from pathlib import Path
from penstock.services.trainer.export.exporter import Exporter
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.replicas.run_secret import RunSecret
from penstock.shared.settings import load

async def main(url, run_id, folder):
    await Exporter(await Bus.connect(url, run_id), load(Path(folder) / 'settings.toml')).run()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
async def test_an_export_whose_trainer_is_killed_is_done_again_by_the_next_and_asked_again_it_is_the_same(
    parts: Coordinator,
    http: httpx.AsyncClient,
    run: Run,
    bus: Bus,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "_PRIORITY", 0)  # a loaded machine would hardly finish it
    answer = await http.post("/v1/policies/1/export")
    assert (answer.status_code, answer.headers["location"]) == (202, "/v1/operations/1")
    assert (await http.post("/v1/policies/1/export", json={"adapter": False})).json()["id"] == 1
    command = [sys.executable, "-c", _TRAINER, server.url, bus.run_id, str(run.settings.run_folder)]
    first = await asyncio.to_thread(subprocess.Popen, command, cwd=ROOT)
    seen: list[psutil.Process] = []

    def exports() -> bool:
        seen[:] = processes(first.pid)
        return bool(seen)

    await until(exports)
    (child,) = seen
    first.kill()
    first.wait(PATIENCE_S)
    await until(lambda: not is_alive(child.pid))
    async with trainer(bus, run):
        done = await ended(http)
        folder = run.settings.run_folder / "exports" / "v000001"
        assert done["result"] == {"version": 1, "step": 0, "folder": str(folder), "adapter": False}
        assert (done["state"], done["phase"]) == ("succeeded", "writing")
        assert "attempt 2" not in done["detail"]
        assert_is(loaded(folder), run.published())
        assert [path.name for path in folder.parent.iterdir()] == ["v000001"]

        assert (await http.post("/v1/policies/1/export")).json()["id"] == 2
        again = await ended(http, 2)
        assert (again["result"], again["detail"]) == (done["result"], f"it is in {folder}: it existed already")
        async with served(parts, parts.api.folder, Access()) as url:
            announced = json.dumps({"url": url, "run_id": bus.run_id})
            (parts.api.folder / "coordinator.json").write_text(announced)
            words = ["export", str(parts.api.folder), "--version", "1", "--to", str(tmp_path / "mine")]
            assert await asyncio.to_thread(main, words) == 0
        assert_is(loaded(tmp_path / "mine"), run.published())
    assert await Exports(bus).orders() == []
    told = [event.detail for _, event in await bus.newest(EVENTS, Event, 9) if event.name == "policy exported"]
    assert told == [f"version 1: {folder}"] * 3  # twice by HTTP, once by the command line


@pytest.mark.usefixtures("unfinished")
async def test_a_process_that_is_killed_ends_its_export_as_failed(http: httpx.AsyncClient, run: Run, bus: Bus) -> None:
    async with trainer(bus, run):
        await http.post("/v1/policies/1/export")
        await until(processes)
        (child,) = processes()
        await until(lambda: child.nice() == exporter._PRIORITY)
        child.kill()
        done = await ended(http)
    assert done["state"] == "failed"
    assert "was killed by SIGKILL" in done["detail"]
    assert list((run.settings.run_folder / "exports").iterdir()) == []


@pytest.mark.usefixtures("unfinished")
async def test_an_export_whose_order_the_bus_loses_is_begun_again(http: httpx.AsyncClient, run: Run, bus: Bus) -> None:
    async with trainer(bus, run):
        await http.post("/v1/policies/1/export")
        await until(processes)
        (first,) = processes()
        await raw(bus).delete(bus.keys.named("exports"))
        await until(lambda: {process.pid for process in processes()} - {first.pid})
        assert (await operation(http))["state"] == "running"
    await until(lambda: not processes())


@pytest.mark.usefixtures("unfinished")
async def test_a_rollback_that_revokes_its_version_cancels_an_export(
    http: httpx.AsyncClient, run: Run, bus: Bus
) -> None:
    async with trainer(bus, run):
        await http.post("/v1/policies/1/export")
        await until(processes)
        await raw(bus).execute_command("SADD", bus.keys.named("revoked"), 1)
        assert (await ended(http))["detail"] == "version 1 was revoked: a rollback left its branch"
        await until(lambda: not processes())
    assert list((run.settings.run_folder / "exports").iterdir()) == []


async def test_an_export_that_every_trainer_dies_of_is_not_tried_for_ever(
    http: httpx.AsyncClient, run: Run, bus: Bus
) -> None:
    await http.post("/v1/policies/1/export")
    exports = Exports(bus)
    await until(exports.orders)
    assert [await exports.take(1, name) for name in ("one", "one", "two")] == [1, 1, 2]
    async with trainer(bus, run):
        done = await ended(http)
    assert done["state"] == "failed"
    assert "the trainer ended 2 times" in done["detail"]


async def test_without_a_trainer_an_export_ends_as_failed_and_says_what_to_do(bus: Bus, parts: Coordinator) -> None:
    exporting = Exporting(bus, Ledger(bus), settings(parts.api.folder), patience_s=0.2)
    operations = Operations(bus, {"export": exporting.see_through})
    begun = await operations.begin("export", "waiting", {"version": 3, "adapter": False})

    async def ignore(phase: str, detail: str) -> None:
        assert (phase, detail) == ("waiting", "for the trainer")

    outcome = await exporting.see_through(begun, ignore)
    assert outcome.state.value == "failed"
    assert (
        "no trainer took the export for 0 s: start one, or run on a machine with the run's folder: `penstock export --here`"
        in outcome.detail
    )
    assert await Exports(bus).orders() == []


async def test_an_export_that_is_under_way_when_the_run_and_its_trainer_end_ends_as_failed(
    http: httpx.AsyncClient, parts: Coordinator, run: Run, bus: Bus
) -> None:
    await http.post("/v1/policies/1/export")
    await http.post("/v1/run/stop")
    await until(lambda: parts.lifecycle.closed)
    trainer = Presence(bus, "trainer", "trainer-0", 60.0, Status(state="waiting"))
    leave = asyncio.Event()
    beating = asyncio.create_task(trainer.run(leave))
    await until(lambda: heartbeats(bus))
    await parts._leave()
    assert (await operation(http))["state"] == "running", "its trainer is still there"
    leave.set()
    await beating
    await trainer.leave()
    await parts._leave()
    done = await operation(http)
    assert (done["state"], done["detail"].partition(": ")[0]) == (
        "failed",
        "the run's services ended before it was complete",
    )


@pytest.mark.parametrize(
    ("version", "body", "status", "words"),
    [
        (9, None, 404, "this run has no policy version 9; it has versions up to 4"),
        (3, None, 409, "version 3 has no checkpoint; there are 0, 1"),
        (2, None, 409, "version 2 was revoked"),
        (1, {"adapter": True}, 409, "this run trains whole weights and has no adapter"),
        (1, {"to": "/etc"}, 422, "Extra inputs are not permitted"),
    ],
)
async def test_what_cannot_be_exported_is_refused_at_once(
    http: httpx.AsyncClient, run: Run, version: int, body: dict[str, Any] | None, status: int, words: str
) -> None:
    answer = await http.post(f"/v1/policies/{version}/export", json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert words in answer.json()["detail"]
    assert (await http.get("/v1/operations")).json()["items"] == []


@pytest.mark.parametrize("version", [0, 4])
async def test_the_initial_policy_and_what_may_lie_on_disk_may_be_asked_for(
    http: httpx.AsyncClient, version: int
) -> None:
    assert (await http.post(f"/v1/policies/{version}/export")).status_code == 202


@pytest.mark.usefixtures("unfinished")
async def test_cleanup_leaves_the_checkpoint_that_is_exported(
    bus: Bus, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint,) = local_store.find(run.settings.run_folder / "checkpoints")
    newer = dataclasses.replace(
        checkpoint, state=dataclasses.replace(checkpoint.state, step=2, version=V(2)), folder=Path("/new")
    )
    monkeypatch.setattr(local_store, "superfluous", lambda *_: [checkpoint])
    context = Context(
        run.settings, "trainer", "trainer-0", bus, Status(), asyncio.Event(), Live(bus, run.settings),
        Cordon(bus, "trainer-0", lambda: None), RunSecret(bus),
    )  # fmt: skip
    driver = Driver(context, Mailbox(), own_devices(context), Place(bus, "trainer-0", 1.0))
    driving = asyncio.create_task(driver.run())
    await Exports(bus).place(1, V(1), adapter=False)
    await until(processes)
    await driver._retention.note(newer.state.step, Saved(newer))
    assert checkpoint.folder.is_dir()
    driving.cancel()
    await asyncio.gather(driving, return_exceptions=True)
    assert processes() == []
    driver._exporter.reading = ""
    await driver._retention.note(newer.state.step, Saved(newer))
    assert not checkpoint.folder.exists()


def test_a_coordinator_that_is_gone_or_leads_another_run_is_not_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, 1, 0)
    (run.settings.run_folder / "coordinator.json").write_text(
        json.dumps({"url": "http://127.0.0.1:9", "run_id": "exported"})
    )
    words = ["export", str(run.settings.run_folder), "--version", "7"]
    capsys.readouterr()  # what saving the model printed
    assert main(words) == 1
    assert capsys.readouterr().err.startswith("penstock export: there are no weights of version 7 of run exported")
    assert main([*words, "--url", "http://127.0.0.1:9"]) == 1
    assert "no coordinator answers at http://127.0.0.1:9" in capsys.readouterr().err
