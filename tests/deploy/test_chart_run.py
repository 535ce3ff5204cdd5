"""Rendered containers run as local processes, with their own command, environment and files."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.claims import is_claim
from penstock.shared.bus.keys import PAYLOADS
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.streams import EVAL_PROMPTS, EVAL_ROLLOUTS, PROMPTS, ROLLOUTS, TRAINING_STREAMS
from tests.chaos.audit import Watcher, audit_groups, audit_versions
from tests.conftest import need, need_module, until
from tests.support.chart import Json, Release, merged, play, render, values
from tests.support.fake_kubernetes import JOB_SET
from tests.support.pods import Cluster, Pod
from tests.support.raw_redis import raw
from tests.support.trackers import tensorboard

SERVICES = ("coordinator", "rollout", "reward", "trainer", "executor", "tracking")
JOBS = ("trainer", "rollout", "reward")
PATIENCE_S = 200.0


def revisions() -> list[Json]:
    """Return values of an install, a full upgrade, and one to a JobSet."""
    smoke_values = values("cpu-smoke")
    config = re.sub(r"(?m)^(every_steps|problems) = .*$", r"\1 = 4", smoke_values["run"]["config"])  # short evaluations
    config = config.replace("groups_per_step = 32", "groups_per_step = 4").replace("steps = 200", "steps = 100000")
    config += '\n[tracking]\nsinks = ["tensorboard"]\n'
    own = {"image": smoke_values["coordinator"]["image"]}
    more = {"executor": {"enabled": True, **own}, "tracking": own}
    first = merged(smoke_values, {"run": {"config": config, "kind": "workloads"}, **more})
    first["networkPolicy"] = {"enabled": False}  # nothing enforces them between these processes
    images: Json = {
        role: {"image": smoke_values["coordinator"]["image"].replace("0.2.0", "0.2.1")} for role in SERVICES
    }
    more_checkpoints = {"config": config.replace("checkpoint_every_steps = 50", "checkpoint_every_steps = 2")}
    second = merged(first, {**images, "run": more_checkpoints})
    return [first, second, merged(second, {"run": {"kind": "auto"}})]


class Api:
    def __init__(self, cluster: Cluster) -> None:
        token = cluster.content("Secret", "demo-penstock-api")["token"]
        self._client = httpx.AsyncClient(
            base_url=cluster.resolve("http://demo-penstock-coordinator:8000"),
            headers={"Authorization": f"Bearer {token}"},
            limits=httpx.Limits(max_keepalive_connections=0),  # each request may go to another pod
            timeout=PATIENCE_S,
            trust_env=False,
        )
        self._asking: asyncio.Task[None] | None = None
        self._step = 0

    @property
    def step(self) -> int:
        assert self._asking is not None
        if self._asking.done():
            self._asking.result()
        return self._step

    async def post(self, path: str, body: Json) -> None:
        (await self._client.post(path, json=body)).raise_for_status()

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncIterator["Api"]:
        self._asking = asyncio.create_task(self._ask())
        try:
            yield self
            assert self.step > 0
        finally:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
            await self._client.aclose()

    async def _ask(self) -> None:
        while True:
            answer = (await self._client.get("/v1/run")).raise_for_status()
            self._step = int(answer.json()["step"])
            await asyncio.sleep(0.1)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[tuple[Cluster, Sequence[Release]]]:
    need_module("helm_sdkpy", "helm-sdkpy")
    need("bwrap", "bubblewrap")  # without it the executor refuses to run beside root's Python
    first, *later = play(revisions(), crds=JOB_SET)
    assert not [release.error for release in (first, *later) if release.error]
    made = Cluster(first, tmp_path)
    await made.open()
    yield made, later
    await made.close()


@pytest.mark.slow
@pytest.mark.timeout(500)
async def test_what_the_chart_renders_comes_up_learns_is_upgraded_while_it_trains_and_drains(
    cluster: tuple[Cluster, Sequence[Release]],
) -> None:
    made, (second, third) = cluster
    await _comes_up(made)
    password = made.content("Secret", "demo-penstock-bus")["password"]
    bus = await Bus.connect(f"redis://:{password}@{made.pods['bus'].address}:6379/0", "demo", wait_s=PATIENCE_S)
    try:
        async with Api(made).answering() as api, Watcher(bus).watching() as watcher:
            await _trains(made, api, 3)
            await _passes_its_check(made)
            await _backlogs_are_numbers(bus)
            assert await made.upgrade(second) == dict.fromkeys(SERVICES, 0)  # every service, and not the bus
            await _trains(made, api, 2)
            await _is_upgraded(made, bus)
            assert await made.upgrade(third) == dict.fromkeys(("coordinator", "rollout", "reward", "trainer"), 0)
            assert [made.pods[role].owner["kind"] for role in JOBS] == ["Job", "Job", "Job"]
            await _trains(made, api, 2)
            await api.post("/v1/run/stop", {"reason": "the test is over"})
            await until(lambda: _nothing_is_in_flight(bus), timeout_s=PATIENCE_S)
        await audit_groups(bus)
        await audit_versions(bus)
        await watcher.audit()
    finally:
        await bus.close()
    runs = made.folder / "claims" / "demo-penstock-runs" / "demo"
    await until(lambda: len(_tracked(runs)) >= 7)  # at its end the service has ten seconds for the rest
    trainer = made.pods["trainer"].process
    assert trainer is not None
    assert await asyncio.to_thread(trainer.wait, PATIENCE_S) == 0  # by itself, by which the JobSet is complete
    for role in ("executor", "reward", "rollout", "tracking", "coordinator"):
        expected = 143 if role in JOBS else 0  # a Job restarts what was evicted
        assert await made.pods[role].ends() == expected, made.pods[role].log.read_text()[-3000:]
    assert await made.pods["bus"].ends() == 0
    shown = _tracked(runs)
    assert len((runs / "metrics.jsonl").read_text().splitlines()) >= len(shown) >= 7
    assert shown == list(range(1, len(shown) + 1)), "each once, though the service was upgraded"


@pytest.mark.slow
@pytest.mark.timeout(500)
async def test_the_one_pod_runs_to_its_end_frees_its_gpus_and_has_nothing_to_do_afterwards(tmp_path: Path) -> None:
    config = values()["run"]["config"].replace("steps = 200", "steps = 1").replace("replicas = 2", "replicas = 1")
    config = re.sub(r"(?s)\[evaluation\].*?(?=\n\[)", "", config).replace("warmup_steps = 5", "warmup_steps = 1")
    run = {"config": f'{config}\n[placement]\nmode = "shared"\n', "kind": "pod"}
    made = Cluster(render(values(run=run, pod={"gpu": {"count": 0}})), tmp_path)
    try:
        for expected in ("finished: 1 step\n", "has finished"):
            pod = Pod(made, made.release.workload("pod"))
            pod.start()
            assert pod.process is not None
            assert await asyncio.to_thread(pod.process.wait, PATIENCE_S) == 0, pod.log.read_text()[-3000:]
            assert expected in pod.log.read_text()
    finally:
        await made.close()
    folder = tmp_path / "claims" / "demo-penstock-runs" / "demo"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["state"], summary["steps"], summary["gpu_hours"]) == ("finished", 1, 0.0)
    assert summary["switches"] > 0


@pytest.mark.slow
@pytest.mark.timeout(500)
async def test_pods_keep_payloads_on_volumes_of_their_own_with_a_copy_on_another_node(tmp_path: Path) -> None:
    smoke_values = values("cpu-smoke")
    config = smoke_values["run"]["config"].replace("[bus]", "[bus]\nshelve_above_bytes = 1")
    config = config.replace("groups_per_step = 32", "groups_per_step = 4")
    config = re.sub(r"(?s)\[evaluation\].*?(?=\n\[)", "", config)
    shelved = {"run": {"config": config, "kind": "workloads"}, "networkPolicy": {"enabled": False}}
    made = Cluster(render(merged(smoke_values, shelved)), tmp_path)
    services = ("coordinator", *JOBS)
    await made.open()
    try:
        await _comes_up(made, services)
        password = made.content("Secret", "demo-penstock-bus")["password"]
        bus = await Bus.connect(f"redis://:{password}@{made.pods['bus'].address}:6379/0", "demo", wait_s=PATIENCE_S)
        async with Api(made).answering() as api:
            await _trains(made, api, 2, services)
        assert all(map(is_claim, (await bus.hgetall(PAYLOADS)).values()))
        nodes = {beat.replica: beat.node for beat in await heartbeats(bus) if beat.shelf}
        await bus.close()
        for role in ("rollout", "reward"):
            pod = made.pods[role]
            assert nodes[pod.name] == f"node-of-{pod.name}"
            assert list((pod.folder / "shelf" / pod.name).iterdir()), "its own payloads, or copies"
            async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as http:
                metrics = (await http.get(f"http://{pod.address}:9400/metrics")).text
            assert float(re.findall(r'(?m)^penstock_shelf_payloads_total\{outcome="shelved"\} (.+)$', metrics)[0]) > 0
            assert 'penstock_shelf_payloads_total{outcome="same_host"} 0.0' in metrics
        assert not list((tmp_path / "claims").glob("*/demo/shelf/ro*")), "the run's volume has the trainer's only"
    finally:
        await made.close()


def _tracked(runs: Path) -> list[int]:
    """Return the steps that the tracker shows."""
    started = any((runs / "tensorboard").glob("demo/*"))
    return [step for step, _ in tensorboard(runs, "demo", "train/reward")] if started else []


async def _comes_up(made: Cluster, services: Sequence[str] = SERVICES) -> None:
    bus = made.pods["bus"]
    bus.start()
    await bus.starts()
    for role in services:
        made.pods[role].start()
    await asyncio.gather(*(made.pods[role].starts() for role in services))
    for role in services:
        container = made.pods[role].container
        for probe in ("readinessProbe", "livenessProbe"):
            await until(lambda role=role, probe=container[probe]: made.pods[role].answers(probe))


async def _passes_its_check(made: Cluster) -> None:
    check = made.pods["check"]
    check.start()
    assert check.process is not None
    assert await asyncio.to_thread(check.process.wait, PATIENCE_S) == 0, check.log.read_text()
    *findings, said = [json.loads(line) for line in check.log.read_text().splitlines()]
    assert said["run"] == "running"
    checks = ("dns", "settings", "bus", "maxmemory", "clock", "replicas")
    assert [(finding["check"], finding["ok"]) for finding in findings] == [(check, True) for check in checks]
    assert findings[2]["sentence"].startswith("valkey 9")


async def _backlogs_are_numbers(bus: Bus) -> None:
    """``lag`` is null if the server cannot tell, as after deletions."""
    for stream in (PROMPTS, ROLLOUTS, EVAL_PROMPTS, EVAL_ROLLOUTS):
        (group,) = await raw(bus).xinfo_groups(bus.keys.of(stream))
        assert group["name"].decode() == stream.group
        assert isinstance(group["lag"], int)
        assert isinstance(group["pending"], int)


async def _trains(made: Cluster, api: Api, count: int, services: Sequence[str] = SERVICES) -> None:
    goal = api.step + count

    def reached() -> bool:
        for role in services:
            process = made.pods[role].process
            assert process is not None
            assert process.poll() is None, made.pods[role].log.read_text()[-3000:]
        return api.step >= goal

    await until(reached, timeout_s=PATIENCE_S)


async def _is_upgraded(made: Cluster, bus: Bus) -> None:
    names = {made.pods[role].name for role in SERVICES if role != "executor"}  # it has no bus
    await until(lambda: _are_there(bus, names), timeout_s=PATIENCE_S)
    folder = Path(made.folder / "claims" / "demo-penstock-runs" / "demo" / "checkpoints")
    await until(lambda: len(list(folder.iterdir())) >= 2, timeout_s=PATIENCE_S)  # each second step, not each fiftieth


async def _are_there(bus: Bus, names: set[str]) -> bool:
    return {beat.replica for beat in await heartbeats(bus)} == names


async def _nothing_is_in_flight(bus: Bus) -> bool:
    return not any([await bus.length(stream) for stream in TRAINING_STREAMS])
