"""A real Prometheus (``penstock up --prometheus``): every panel and alert has series."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.dashboards.__main__ import BOARDS
from penstock.services.cli.__main__ import main
from penstock.services.client.views import ReplicaView
from penstock.services.up.metrics import prometheus
from penstock.services.up.metrics.targets import Targets, targets_file
from penstock.services.up.plan import ProcessPlan
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.streams import PROMPTS
from penstock.shared.errors import SettingsError
from tests.chaos import episodes
from tests.conftest import PATIENCE_S, need, until
from tests.deploy.test_dashboards import alerts_and_records
from tests.support import forge
from tests.support.prometheus_server import Prometheus
from tests.support.promql import filled, metrics, series
from tests.support.raw_redis import raw

ROOT = Path(__file__).parents[2]
SCRAPED_EVERY_S = 2.0
SILENT = {
    "penstock_nccl_transport": "there is no GPU",
    "DCGM_": "NVIDIA's exporter is a process of the cluster",
    "vllm:": "vLLM speaks of itself only where it is the engine",
    "penstock_rollout_logprobs_captured": "the same",
    "penstock_reward_model_": "the example has no reward model",
    "penstock_reward_batch_fill_ratio": "the same",
    "penstock_reward_lenient_total": "no scorer of the example compares answers",
    "penstock_executor_": "no scorer of the example runs code",
    "penstock_reward_process_restarts_total": "nothing is replaced without a fault",
}
"""Metric prefixes without series unless there are faults, and why."""


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "watched"
        chosen = {
            **episodes.flags(folder),
            "episodes.replicas": 1,
            "run.folder": folder,
            "run.id": "watched",
            "run.steps": 100_000,
            "evaluation.every_steps": 5,
            "trainer.checkpoint_every_steps": 5,
            "internal.probe_every_versions": 2,
            "algorithm.groups_per_step": 8,
        }
        flags = [f"--{setting}={value}" for setting, value in chosen.items()]
        self.log = folder / "up.log"
        with self.log.open("wb") as log:
            self.process = forge.start("penstock.services.cli", ["up", episodes.CONFIG, "--prometheus", *flags], log)
        self.prometheus = Prometheus(self.log)

    def ask(self, expression: str) -> list[dict[str, Any]]:
        return self.prometheus.ask(expression)

    def targets(self) -> dict[str, str]:
        try:
            entries = json.loads(targets_file(self.folder).read_text())
        except FileNotFoundError:
            return {}
        return {group["labels"]["instance"]: group["targets"][0] for group in entries}

    async def bus(self) -> Bus:
        url = json.loads((self.folder / "up.json").read_text())["bus"]
        return await Bus.connect(url, "watched", wait_s=PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            for _ in range(2):  # the second one: at once
                self.process.send_signal(signal.SIGINT)
                time.sleep(0.2)
            try:
                self.process.wait(180)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    need("prometheus", "prometheus")
    run = Run(tmp_path_factory.mktemp("runs"))
    yield run
    run.close()


@pytest.fixture(scope="module")
def paused(run: Run) -> Run:
    """Leave the machine to others, as the metrics of processes are there without work."""
    while main(["pause", "--run", str(run.folder)]) != 0:
        assert run.process.poll() is None, run.log.read_text()
        time.sleep(1.0)
    return run


def reason_for_silence(expression: str) -> str:
    names = metrics(expression)
    return next((why for start, why in SILENT.items() if any(name.startswith(start) for name in names)), "")


async def all_answered(run: Run, expressions: dict[str, str]) -> None:
    waiting = dict(expressions)

    async def answered() -> bool:
        assert run.process.poll() is None, run.log.read_text()
        for name in [name for name, expression in waiting.items() if run.ask(expression)]:
            del waiting[name]
        if waiting:
            await asyncio.sleep(SCRAPED_EVERY_S)  # to ask takes time that the run needs
        return not waiting

    try:
        await until(answered)
    except TimeoutError:
        pytest.fail(f"no data: {waiting}\n{run.log.read_text()[-2000:]}")


@pytest.mark.slow
@pytest.mark.debian
async def test_every_panel_of_a_live_run_shows_data(run: Run) -> None:
    panels = {
        f"{board.name}/{panel.title}/{number}": filled(query.expression)
        for board in BOARDS
        for panel in board.panels
        for number, query in enumerate(panel.queries)
    }
    await all_answered(run, {name: text for name, text in panels.items() if not reason_for_silence(text)})


@pytest.mark.slow
@pytest.mark.debian
async def test_every_alert_looks_at_series_that_a_live_run_has(run: Run) -> None:
    watched = {
        f"{name}: {name_of_series}": name_of_series
        for name, text in alerts_and_records()[0].items()
        for name_of_series in series(text)
    }
    await all_answered(run, {name: text for name, text in watched.items() if not reason_for_silence(text)})


@pytest.mark.slow
@pytest.mark.debian
async def test_every_service_is_a_target_by_run_service_and_replica(paused: Run) -> None:
    replicas = {"coordinator-0", "episodes-0", "rollout-0", "rollout-1", "reward-0", "trainer-0"}
    await until(lambda: {str(sample["metric"]["instance"]) for sample in paused.ask("up == 1")} == replicas)
    (sample,) = paused.ask('up{instance="rollout-1"}')
    assert sample["metric"] == {
        "__name__": "up", "job": "penstock", "run": "watched", "service": "rollout", "instance": "rollout-1",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.debian
async def test_promtool_finds_nothing_in_the_metrics_of_any_service(paused: Run) -> None:
    promtool = need("promtool", "prometheus")
    await until(lambda: len(paused.targets()) == 6)
    for name, address in paused.targets().items():
        text = httpx.get(f"http://{address}/metrics", timeout=PATIENCE_S).text
        done = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), name


@pytest.mark.slow
@pytest.mark.debian
async def test_a_killed_replica_stays_in_sight_and_comes_back_under_its_name(paused: Run) -> None:
    await until(lambda: len(paused.ask("up == 1")) == 6)
    before = paused.targets()["rollout-1"]
    rows = json.loads((paused.folder / "up.json").read_text())["processes"]
    os.kill(next(row["pid"] for row in rows if row["name"] == "rollout-1"), signal.SIGKILL)
    await until(lambda: bool(paused.ask('changes(process_start_time_seconds{instance="rollout-1"}[10m]) >= 1')))
    assert paused.targets()["rollout-1"] != before
    assert paused.ask('up{instance="rollout-1"}')


@pytest.mark.slow
@pytest.mark.debian
async def test_a_message_that_nobody_can_read_raises_the_alert_of_dead_letters(paused: Run) -> None:
    await until(lambda: len(paused.ask("up == 1")) == 6)
    firing = 'ALERTS{alertname="PenstockDeadLetters",alertstate="firing"}'
    assert not paused.ask(firing)
    bus = await paused.bus()
    try:
        await raw(bus).xadd(bus.keys.of(PROMPTS), {b"group": b"poison", b"data": b"\xc1 not msgpack"})
    finally:
        await bus.close()
    await until(lambda: bool(paused.ask(firing)))


def test_without_prometheus_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SettingsError, match="--prometheus needs the program prometheus on PATH"):
        prometheus.find_program()


@pytest.fixture
def targets(tmp_path: Path) -> Targets:
    def process(name: str, address: tuple[str, int] | None) -> ProcessPlan:
        return ProcessPlan(name=name, service=name.split("-")[0], command=(), environment={}, address=address)

    executor, prometheus = process("executor", ("127.0.0.1", 9501)), process("prometheus", ("127.0.0.1", 9090))
    return Targets(tmp_path / "r", "r", [executor, prometheus, process("reward-0", None)], print)


def reward(cordon: str | None = None) -> ReplicaView:
    return ReplicaView(service="reward", replica="reward-0", address="127.0.0.1:9502", cordon=cordon)


def written(tmp_path: Path) -> object:
    return json.loads((tmp_path / ".metrics" / "r.json").read_text())


EXECUTOR = {"targets": ["127.0.0.1:9501"], "labels": {"run": "r", "service": "executor", "instance": "executor"}}
REWARD = {"targets": ["127.0.0.1:9502"], "labels": {"run": "r", "service": "reward", "instance": "reward-0"}}


@pytest.mark.parametrize("cordon", [None, "cordoned"])
def test_the_executor_is_a_target_without_a_heartbeat_and_a_silent_replica_stays_one(
    tmp_path: Path, targets: Targets, cordon: str | None
) -> None:
    targets.update([reward(cordon)])
    targets.update([])
    assert written(tmp_path) == [EXECUTOR, REWARD]


def test_a_replica_that_was_drained_is_a_target_until_it_has_left_and_again_when_it_comes_back(
    tmp_path: Path, targets: Targets
) -> None:
    targets.update([reward("draining")])
    assert written(tmp_path) == [EXECUTOR, REWARD]
    targets.update([])
    assert written(tmp_path) == [EXECUTOR]
    targets.update([reward()])
    assert written(tmp_path) == [EXECUTOR, REWARD]
