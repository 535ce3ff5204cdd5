"""A service started by hand finds what it needs."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.replicas.cordon import Word, tell_replica
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.stores.replicas.run_secret import RunSecret
from penstock.shared.errors import SettingsError
from penstock.shared.process import service, telemetry
from penstock.shared.process.service import own_host, parse, serve
from penstock.shared.settings import Settings
from tests.conftest import PATIENCE_S, Server, until


def _config(folder: Path, url: str) -> list[str]:
    (folder / "a-run").mkdir()
    config = folder / "settings.toml"
    config.write_text(f'[run]\nid = "a-run"\nfolder = "{folder}"\n[bus]\nurl = "{url}"\n')
    return ["--config", str(config), "--replica", "rollout-7"]


def test_a_replica_that_is_started_by_hand_finds_the_embedded_bus_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK__BUS__URL", raising=False)
    words = _config(tmp_path, "embedded")
    with pytest.raises(SettingsError, match=r"start `penstock up` first, or change bus\.url"):
        parse("rollout", words)
    (tmp_path / "a-run" / "up.json").write_text(json.dumps({"bus": "unix:///tmp/x/valkey.sock", "processes": []}))
    settings, replica = parse("rollout", words)
    assert (settings.bus.url, replica) == ("unix:///tmp/x/valkey.sock", "rollout-7")


def test_a_bus_that_is_named_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK__BUS__URL", raising=False)
    settings, _ = parse("rollout", _config(tmp_path, "redis://somewhere:6379"))
    assert settings.bus.url == "redis://somewhere:6379"


def test_a_process_advertises_its_own_address_and_not_the_coordinators(monkeypatch: pytest.MonkeyPatch) -> None:
    def host(bus: str, **run: str) -> str:
        return own_host(
            Settings.model_validate({"run": run, "bus": {"url": bus}, "coordinator": {"host": "203.0.113.1"}})
        )

    monkeypatch.delenv("POD_IP", raising=False)
    assert host("embedded") == host("unix:///run/valkey.sock") == host("redis://localhost:6379") == "127.0.0.1"
    interfaces = [
        actual.address
        for value in psutil.net_if_addrs().values()
        for actual in value
        if actual.family == socket.AF_INET
    ]
    for own in interfaces:  # a local bus is reached at this address
        for url in ("redis://:secret@{}:1/0", "rediss+sentinel://{}:1,203.0.113.2:1/primary", "redis+cluster://{}:1"):
            assert host(url.format(own)) == own
    monkeypatch.setenv("POD_IP", "203.0.113.2")
    assert host("redis://127.0.0.1") == "203.0.113.2"
    assert host("redis://127.0.0.1", host="trainer.example") == "trainer.example"


def test_an_address_that_cannot_be_derived_is_refused_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POD_IP", raising=False)
    with pytest.raises(
        SettingsError, match=r"no route to the bus at nowhere\.invalid:6379, .*: change bus\.url, or set run\.host to"
    ):
        own_host(Settings.model_validate({"bus": {"url": "redis://nowhere.invalid"}}))


LEAVING = """
import asyncio, sys
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.process import service
async def run(settings, replica):
    async with service.serve(settings, "rollout", replica) as context:
        await context.stop.wait()
        while True:
            await Ledger(context.bus).state()
            await asyncio.sleep(0.01)
sys.exit(service.main("rollout", run, sys.argv[1:]))
"""


def test_a_service_waits_no_longer_for_the_bus_of_an_up_that_was_killed(own_server: Server, tmp_path: Path) -> None:
    """The kernel tells both at once; the service would wait for its bus until the time to stop is over."""
    words = [sys.executable, "-c", LEAVING, *_config(tmp_path, own_server.url), f"--bus.drain_s={10 * PATIENCE_S}"]
    starting = f"import subprocess; print(subprocess.Popen({words!r}, stdout=2).pid, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", starting], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as up:
        assert up.stdout is not None
        replica = psutil.Process(int(up.stdout.readline()))
        asyncio.run(_beats(own_server.url))
        up.kill()
    try:
        replica.send_signal(signal.SIGTERM)
        own_server.stop(signal.SIGTERM)
        replica.wait(PATIENCE_S)
    finally:
        with contextlib.suppress(psutil.Error):
            replica.kill()


STARTERS = "from penstock.shared.process import service; print(service._starters(), flush=True); input()"


@pytest.mark.parametrize("rank", ["", "0"])
def test_the_end_of_the_shell_from_which_up_was_started_is_not_that_of_up(
    rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank:  # its launcher, which is between them, lives on when `penstock up` has been killed
        monkeypatch.setenv("RANK", rank)
    else:
        monkeypatch.delenv("RANK", raising=False)
    looking = f"{STARTERS}; print(service._starters(), flush=True)"
    up = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {looking!r}])"
    shell = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {up!r}])"]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        before = started.stdout.readline()
        started.kill()
        started.wait()
        started.stdin.write(b"\n")
        started.stdin.flush()
        after = started.stdout.readline()
    assert json.loads(before)[0] == json.loads(after)[0]
    assert (before != after) == bool(rank)


async def test_a_single_rank_that_sets_its_number_has_the_same_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    starters, stop = service._starters(), asyncio.Event()
    monkeypatch.setenv("RANK", "0")  # as ``rank_group.start_ranks`` does
    stop.set()
    bus: Any = None  # is not asked for anything
    await service._leave(stop, Settings.model_validate({"bus": {"url": "unix:/tmp/a"}}), bus, starters)


async def _beats(url: str) -> None:
    bus = await Bus.connect(url, "a-run", wait_s=PATIENCE_S)

    async def beats() -> bool:
        return bool(await heartbeats(bus))

    await until(beats)
    await bus.close()


REMAINS = ("asyncio.to_thread(threading.Event().wait)", "asyncio.create_task(stubborn())")


def failing(folder: Path, remains: str) -> list[str]:
    """Return the command line of a service that fails while something ``remains``."""
    program = f"""
import asyncio, sys, threading
from penstock.shared.process import service
async def stubborn():
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass
async def run(settings, replica):
    asyncio.ensure_future({remains})
    await asyncio.sleep(0.1)
    raise RuntimeError("it failed")
service._LEAVE_S = 1.0
sys.exit(service.main("rollout", run, sys.argv[1:]))
"""
    return [sys.executable, "-c", program, *_config(folder, "redis://127.0.0.1:1")]


@pytest.mark.parametrize("remains", REMAINS)
def test_a_service_that_fails_ends_whatever_goes_on_in_it(tmp_path: Path, remains: str) -> None:
    done = subprocess.run(failing(tmp_path, remains), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert "RuntimeError: it failed" in done.stderr
    assert done.returncode == -signal.SIGALRM


@pytest.mark.parametrize("remains", REMAINS)
def test_and_so_does_one_that_is_process_1_as_in_a_container(tmp_path: Path, remains: str) -> None:
    alone = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make namespaces of processes")
    words = [*alone, *failing(tmp_path, remains)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert "RuntimeError: it failed" in done.stderr
    assert "Timeout (0:00:02)!" in done.stderr  # and the threads' stacks
    assert done.returncode == 1


async def test_a_service_whose_heartbeats_fail_ends_with_their_error(
    own_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(bus: Bus, *_: object) -> None:
        raise RuntimeError("a bug in a heartbeat")

    monkeypatch.setattr(telemetry, "beat_once", fail)
    settings = Settings.model_validate({"run": {"id": "beats", "folder": tmp_path}, "bus": {"url": own_server.url}})
    with pytest.raises(RuntimeError, match="a bug in a heartbeat"):
        async with asyncio.timeout(PATIENCE_S), serve(settings, "rollout", "rollout-0"):
            await asyncio.Event().wait()


async def test_a_heartbeat_brings_orders_settings_and_secret_and_what_it_brought_is_reported_at_once(
    own_server: Server, tmp_path: Path
) -> None:
    tables = {"run": {"id": "heard", "folder": tmp_path}, "bus": {"url": own_server.url}}
    settings = Settings.model_validate({**tables, "internal": {"heartbeat_s": 10 * PATIENCE_S}})
    bus = await Bus.connect(own_server.url, "heard", wait_s=PATIENCE_S)
    await tell_replica(bus, "rollout-0", Word.CORDONED)
    assert await Live(bus, settings).change(0, {"algorithm.max_lag": 2}, "") is not None
    secret = RunSecret(bus)
    await secret.refresh()

    async def is_reported() -> bool:
        return [(beat.settings_revision, beat.taking) for beat in await heartbeats(bus)] == [(1, False)]

    async with serve(settings, "rollout", "rollout-0") as context:
        await until(is_reported)
        assert (context.live.settings.algorithm.max_lag, context.secret()) == (2, secret())
    await bus.close()
