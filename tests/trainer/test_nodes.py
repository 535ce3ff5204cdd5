"""A trainer across hosts: two processes joined like pods."""

import asyncio
import contextlib
import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.services.trainer.checkpoint import local_store
from penstock.services.up.prepare import prepare
from penstock.shared.bus.stores.policy.ledger import RunState
from penstock.shared.errors import SettingsError
from penstock.shared.settings import load
from tests.conftest import PATIENCE_S, Server, free_port, until
from tests.support import forge
from tests.support.listeners import listeners
from tests.support.tolerance import ADAM_MOVEMENT, moved_apart
from tests.trainer.test_service import GROUPS, Run, bus_of, feed, initial_weights


@contextlib.contextmanager
def hosts(run: Run, rendezvous: int, metrics: int, *, forked: bool = False) -> Iterator[list[forge.Started]]:
    """Start on 127.0.0.1 and 127.0.0.2, like pods."""
    flags = ["--trainer.nodes", "2", "--trainer.rendezvous", f"127.0.0.1:{rendezvous}"]
    processes = []
    try:
        for node in (0, 1):
            words = ["--config", run.config, "--replica", f"trainer-{node}", "--trainer.node", node, *flags]
            words += ["--run.metrics_port", metrics]
            with run.log.open("a") as log:
                processes.append(
                    forge.start("penstock.services.trainer", words, log, forked=forked, POD_IP=f"127.0.0.{node + 1}")
                )
        yield processes
    finally:
        for process in processes:
            kill(process)
            process.wait(PATIENCE_S)


def kill(host: forge.Started) -> None:
    if host.poll() is None:
        launcher = psutil.Process(host.pid)
        for process in (*launcher.children(recursive=True), launcher):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return bool(json.load(answer)["ready"])
    return False


@pytest.mark.slow
@pytest.mark.timeout(480)
async def test_two_hosts_train_as_one_and_come_back_when_one_of_them_dies(tmp_path: Path, server: Server) -> None:
    single = Run(tmp_path, server, "one-host")
    async with bus_of(single) as (bus, ledger), single.trainer() as process:
        await feed(bus, 0, 3 * GROUPS)
        await single.reaches(ledger, 3, process)
        expected = await single.weights(ledger)

    two = Run(tmp_path, server, "two-hosts", ranks=1)
    metrics = free_port()
    async with bus_of(two) as (bus, ledger):
        await feed(bus, 0, 2 * GROUPS)
        with hosts(two, free_port(), metrics) as (first, second):
            await two.reaches(ledger, 2, first)
            for host in ("127.0.0.1", "127.0.0.2"):
                await until(lambda host=host: asyncio.to_thread(answers, f"http://{host}:{metrics}/readyz"))
            seen = listeners(first.pid, second.pid)
            assert {listener.address for listener in seen} <= {"127.0.0.1", "127.0.0.2"}, seen
            kill(second)
            assert await asyncio.to_thread(first.wait, PATIENCE_S) != 0  # its supervisor restarts it
        await feed(bus, 2 * GROUPS, GROUPS)
        with hosts(two, free_port(), metrics, forked=True) as (first, _):
            await two.reaches(ledger, 3, first)
            weights = await two.weights(ledger)
            assert await bus.counts() == {"trained": 3 * GROUPS}
    assert moved_apart(weights, expected, initial_weights()) < ADAM_MOVEMENT


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("host", [0, 1, None])
async def test_any_host_that_is_told_to_stop_and_the_end_of_the_run_stop_all_of_them_in_order(
    tmp_path: Path, server: Server, host: int | None
) -> None:
    of_a_job = "stopped_exit_status = 143\nleave_when_over = true"
    run = Run(tmp_path, server, f"stopped-{host}", ranks=1, checkpoint_every_steps=1000, internal=of_a_job)
    async with bus_of(run) as (bus, ledger):
        await feed(bus, 0, GROUPS)
        with hosts(run, free_port(), free_port(), forked=True) as both:
            await run.reaches(ledger, 1, both[0])
            if host is None:
                await ledger.transition(RunState.STOPPED, "the test is over", [RunState.CREATED, RunState.RUNNING])
                await ledger.close()
            else:
                both[host].send_signal(signal.SIGTERM)
            expected = 0 if host is None else 143  # for which a Job restarts the pod
            assert [await asyncio.to_thread(each.wait, PATIENCE_S) for each in both] == [expected, expected]
    saved = local_store.find(tmp_path / "runs" / run.run_id / "checkpoints")
    assert [checkpoint.state.step for checkpoint in saved] == [1]


def test_several_hosts_need_a_place_to_meet(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[trainer]\nnodes = 2\n")
    with pytest.raises(
        SettingsError, match=r"expected trainer\.rendezvous and trainer\.node < 2 with trainer\.nodes = 2"
    ):
        load(config)


@pytest.mark.parametrize(
    "text",
    [
        '[trainer]\nnodes = 2\nrendezvous = "a:1"\n',
        '[rollout]\nnodes = 2\nrendezvous = "a:1"\nsecret_file = "s"\nvllm.tensor_parallel_size = 2\n',
    ],
)
def test_up_starts_one_host(tmp_path: Path, text: str) -> None:
    config = tmp_path / "run.toml"
    config.write_text(text)
    name = text[1:].partition("]")[0]
    with pytest.raises(
        SettingsError, match=rf"expected {name}\.nodes = 1 with `penstock up`, which starts one host, found 2"
    ):
        prepare(config, None, ())
