"""A run over real network interfaces: trainers on two hosts, a replica on a third, the bus on a fourth."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.shared.bus import embedded
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat, heartbeats
from penstock.shared.bus.streams import PUBLISHED
from tests.conftest import Server, until
from tests.support.two_hosts import Hosts, module
from tests.trainer.test_service import GROUPS, Run, bus_of, feed

PORT, MEETING = 6379, 29500


@contextlib.asynccontextmanager
async def placed(folder: Path, hosts: Hosts) -> AsyncIterator[tuple[Run, Server]]:
    """Start a bus on its host; return the run, whose settings name that host, and the bus as this test reaches it."""
    server = Server(folder)
    address = hosts.addresses["bus"]
    listening = ["--port", str(PORT), "--bind", address, "--protected-mode", "no"]
    hosts.start("bus", [*embedded.command(server.socket, server.data), *listening])
    await until(server.socket.exists)
    reached, server.url = server.url, f"redis://{address}:{PORT}"
    run = Run(folder, server, "two-hosts", transport="pull", ranks=1)
    server.url = reached
    try:
        yield run, server
    finally:
        server.close()


async def beat_of(bus: Bus, replica: str) -> Heartbeat | None:
    return next((beat for beat in await heartbeats(bus) if beat.replica == replica), None)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_hosts_find_their_interfaces_train_together_and_a_replica_elsewhere_pulls(tmp_path: Path) -> None:
    with Hosts("first", "second", "third", "bus") as hosts, (tmp_path / "log").open("a") as log:
        async with placed(tmp_path, hosts) as (run, _), bus_of(run) as (bus, ledger):
            run.log = tmp_path / "log"
            await feed(bus, 0, 2 * GROUPS)
            flags = ("--trainer.nodes", 2, "--trainer.rendezvous", f"{hosts.addresses['first']}:{MEETING}")
            first, _ = (
                hosts.start(
                    host,
                    module(
                        "penstock.services.trainer", "--config", run.config, "--replica", f"trainer-{node}",
                        "--trainer.node", node, *flags,
                    ),
                    log,
                )
                for node, host in enumerate(("first", "second"))
            )  # fmt: skip
            replica = hosts.start(
                "third",
                module(
                    "penstock.services.rollout", "--config", run.config, "--replica", "rollout-0",
                    "--rollout.engine", "transformers",
                ),
                log,
            )  # fmt: skip
            await run.reaches(ledger, 2, first)
            await promote_all(bus, ledger)

            async def is_live() -> bool:
                assert replica.poll() is None, run.log.read_text()[-3000:]
                beat = await beat_of(bus, "rollout-0")
                return beat is not None and beat.version == 2

            await until(is_live)
            record = await ledger.policy(PolicyVersion(2))
            assert record is not None
            assert record.source.startswith(f"{hosts.addresses['first']}:")
            beat = await beat_of(bus, "rollout-0")
            assert beat is not None
            assert beat.address.startswith(f"{hosts.addresses['third']}:")
            await measures_links(hosts, run)


async def promote_all(bus: Bus, ledger: Ledger) -> None:
    """Make the newest version the head, as a coordinator does."""
    for delivery in await bus.read(PUBLISHED, PolicyRecord, "coordinator", 16, 1.0):
        await ledger.promote(delivery)


async def measures_links(hosts: Hosts, run: Run) -> None:
    doctor = module("penstock", "doctor", "--links", run.config, "--json")
    done = await asyncio.to_thread(hosts.run, "third", doctor)
    findings = {each["check"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"link to the bus", "link to the trainer"} <= set(findings)
    assert f" at {hosts.addresses['first']}:" in findings["link to the trainer"]["sentence"]


@pytest.mark.slow
async def test_an_interface_by_which_no_host_is_reached_ends_a_trainer_with_its_setting(tmp_path: Path) -> None:
    with Hosts("first", "bus") as hosts:
        async with placed(tmp_path, hosts) as (run, _):
            words = ("--trainer.nodes", 2, "--trainer.node", 1, "--trainer.rendezvous", f"10.78.0.1:{MEETING}")
            command = module("penstock.services.trainer", "--config", run.config, "--replica", "trainer-1", *words)
            done = await asyncio.to_thread(hosts.run, "first", command, GLOO_SOCKET_IFNAME="lo")
            assert done.returncode != 0
            sentence = (
                "expected GLOO_SOCKET_IFNAME to name an interface by which the other hosts reach this one (wire1)"
            )
            assert sentence in done.stdout + done.stderr
