"""What the chart renders really runs: each container's own command, environment and files, as processes of this machine."""

import asyncio
import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.bus import Bus
from shared.streams import EVAL_PROMPTS, EVAL_ROLLOUTS, PROMPTS, ROLLOUTS
from tests.chart import render, values
from tests.conftest import need, need_module, until
from tests.pods import Cluster

SERVICES = ("coordinator", "rollout", "reward", "trainer", "executor")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    need_module("helm_sdkpy", "helm-sdkpy")
    need("bwrap", "bubblewrap")  # without it the executor refuses to run beside a Python of root's
    found = values("cpu-smoke")
    config = re.sub(r"(?m)^(every_steps|problems) = .*$", r"\1 = 4", found["run"]["config"])  # short evaluations
    config = config.replace("groups_per_step = 32", "groups_per_step = 4").replace("steps = 200", "steps = 1000")
    executor = {"enabled": True, "image": found["coordinator"]["image"]}
    made = Cluster(render(values("cpu-smoke", run={"config": config}, executor=executor)), tmp_path)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_what_the_chart_renders_comes_up_learns_and_drains(cluster: Cluster) -> None:
    bus, check = cluster.pods["bus"], cluster.pods["check"]
    bus.start()
    await bus.starts()
    for role in SERVICES:
        cluster.pods[role].start()
    await asyncio.gather(*(cluster.pods[role].starts() for role in SERVICES))
    for role in SERVICES:
        container = cluster.pods[role].container
        assert cluster.pods[role].answers(container["readinessProbe"])
        assert cluster.pods[role].answers(container["livenessProbe"])

    await until(lambda: _step(cluster) >= 3, timeout_s=200.0)

    check.start()
    assert check.process is not None
    assert await asyncio.to_thread(check.process.wait, 60) == 0, check.log.read_text()
    said = json.loads(check.log.read_text().splitlines()[-1])
    assert said["run"] == "running"
    assert said["bus"].startswith("valkey 9")

    await _backlogs_are_numbers(cluster)
    for role in ("rollout", "reward", "executor", "trainer", "coordinator"):
        assert await cluster.pods[role].ends() == 0, cluster.pods[role].log.read_text()[-3000:]
    assert await bus.ends() == 0
    runs = cluster.folder / "claims" / "demo-penstock-runs" / "demo"
    assert len((runs / "metrics.jsonl").read_text().splitlines()) >= 3


async def _backlogs_are_numbers(cluster: Cluster) -> None:
    """What KEDA asks for: ``lag`` is null where the server cannot tell, as it may not after deletions."""
    password = cluster.content("Secret", "demo-penstock-bus")["password"]
    bus = await Bus.connect(f"redis://:{password}@{cluster.addresses['bus']}:6379/0", "demo", wait_s=10.0)
    try:
        for stream in (PROMPTS, ROLLOUTS, EVAL_PROMPTS, EVAL_ROLLOUTS):
            (group,) = await bus.client.xinfo_groups(bus.keys.of(stream))
            assert group["name"].decode() == stream.group
            assert isinstance(group["lag"], int)
            assert isinstance(group["pending"], int)
    finally:
        await bus.close()


def _step(cluster: Cluster) -> int:
    for role in SERVICES:
        process = cluster.pods[role].process
        assert isinstance(process, subprocess.Popen)
        assert process.poll() is None, cluster.pods[role].log.read_text()[-3000:]
    token = cluster.content("Secret", "demo-penstock-api")["token"]
    url = f"http://{cluster.addresses['coordinator']}:8000/v1/run"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=5.0) as answer:
        return int(json.load(answer)["step"])
