"""Each process that freezes is reported within 15 s, where the run is watched."""

import asyncio
import contextlib
import signal
import socket
from pathlib import Path

import pytest

from penstock.services.coordinator.run import monitor, replicas
from penstock.services.trainer.checkpoint.uploader import in_thread
from penstock.services.trainer.rank0 import retention
from penstock.services.trainer.rank0.retention import Retention
from penstock.services.up import run as up_run
from penstock.services.up import supervisor
from penstock.services.up.display import watch
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Event
from penstock.shared.bus.stores.replicas.heartbeats import MISSED_HEARTBEATS
from penstock.shared.bus.streams import EVENTS
from penstock.shared.settings.internal import InternalSettings
from tests.chaos.run import running
from tests.conftest import until
from tests.support.coordinator_players import settings

LONGEST_S = 15.0
SENTENCES = {
    "trainer-0": "trainer-0 has sent no heartbeat for",
    "rollout-0": "rollout-0 has sent no heartbeat for",
    "reward-0": "reward-0 has sent no heartbeat for",
    "coordinator-0": "the coordinator has not answered for",
    "executor": "executor has not answered for",
    "valkey": "valkey has not answered for",
}


def test_what_is_frozen_is_noticed_and_shown_in_time() -> None:
    shown_s = watch.POLL_S + up_run._SHOW_EVERY_S
    heartbeats_s = InternalSettings().heartbeat_s * (MISSED_HEARTBEATS + 1)
    assert heartbeats_s + replicas.LOOK_S + monitor._KEEP_S + shown_s <= LONGEST_S, "trainer, rollout, reward"
    assert watch.SILENT_S + shown_s <= LONGEST_S, "coordinator"
    assert supervisor.SILENT_S + supervisor._LOOK_EVERY_S <= LONGEST_S, "bus, executor"
    assert retention.SILENT_S + 2 * retention._LOOK_S + shown_s <= LONGEST_S, "object storage"


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_frozen_process_of_each_kind_is_reported_and_the_run_continues(tmp_path: Path) -> None:
    async with running(tmp_path, config="config/code.toml", flags={"reward.executor.isolation": "landlock"}) as run:
        bus = await run.connect()
        await run.more_steps(bus, 1)
        await run.until(lambda: all(run.pid(name) for name in SENTENCES))
        output = tmp_path / "up.txt"
        for name, sentence in SENTENCES.items():
            begun = len(output.read_text())
            assert run.send(name, signal.SIGSTOP)
            await run.until(lambda text=sentence, at=begun: text in output.read_text()[at:])  # type: ignore[misc]
            assert run.send(name, signal.SIGCONT)
            await run.more_steps(bus, 1)
        await bus.close()
        await run.until(lambda: output.read_text().count("answers again") >= 3)  # coordinator, executor and bus


async def test_a_storage_that_hangs_is_reported_before_its_requests_fail(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "SILENT_S", 0.2)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and never answers
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        of = settings(tmp_path, trainer={"store": {"uri": "s3://runs/team", "endpoint": endpoint}})
        kept = Retention(of, bus)
        assert kept.store is not None
        running_, asking = asyncio.create_task(kept.run()), asyncio.create_task(in_thread(kept.store.whole))
        await until(lambda: _is_told(bus, "object storage silent"))
        asking.cancel()
        running_.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running_


async def _is_told(bus: Bus, name: str) -> bool:
    return any(event.name == name for _, event in await bus.newest(EVENTS, Event, 10))
