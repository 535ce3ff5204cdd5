"""Replicas join and leave a running run by hand, and the leading coordinator is killed."""

import signal
import time
from pathlib import Path

import pytest

from penstock.services.coordinator.run.leader_lease import TTL_S
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import Run, harmed
from tests.conftest import PATIENCE_S, until
from tests.support.raw_redis import raw

JOINED = tuple((service, f"{service}-{number}") for service in ("rollout", "reward") for number in (7, 8, 9))
FOLLOWED_WITHIN_S = 5.0


async def _there(bus: Bus, service: str) -> set[str]:
    return {beat.replica for beat in await heartbeats(bus) if beat.service == service and beat.state == "working"}


async def _took(bus: Bus, names: set[str]) -> bool:
    seen: set[str] = set()
    for stream in (streams.PROMPTS, streams.ROLLOUTS):
        rows = await raw(bus).xinfo_consumers(bus.keys.of(stream), stream.group)
        seen |= {row["name"].decode() for row in rows if row.get("inactive", 0) != -1}
    return names <= seen


async def _leader(bus: Bus) -> str:
    name = await raw(bus).hget(bus.keys.named("lease"), "replica")
    return "" if name is None else str(name.decode())


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_from_one_replica_to_four_and_back_no_group_is_lost(tmp_path: Path) -> None:
    async with harmed(tmp_path, flags={"rollout.replicas": 1}) as (run, _, _, bus):
        await run.more_steps(bus, 2)
        await _one_to_four_to_one(run, bus)
        await run.stop()
        await audit_groups(bus)
        await audit_versions(bus)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_leader_that_is_killed_is_followed_and_nothing_is_admitted_twice(tmp_path: Path) -> None:
    async with harmed(tmp_path, flags={"rollout.replicas": 1}) as (run, _, _, bus):
        await run.more_steps(bus, 2)
        await _follow_the_leader(run, bus)
        await run.stop()
        await audit_groups(bus)
        await audit_versions(bus)


async def _one_to_four_to_one(run: Run, bus: Bus) -> None:
    for service, name in JOINED:
        run.join(service, name)
    joined = {name for _, name in JOINED}
    await until(lambda: _took(bus, joined), timeout_s=2 * PATIENCE_S)  # torch is imported four times at once
    await run.more_steps(bus, 2)
    await run.command("/v1/services/rollout-9/drain")  # cordoned, finishes, leaves by itself
    assert await run.left("rollout-9") == 0
    for _, name in JOINED:
        if name.endswith("7"):
            run.send(name, signal.SIGTERM)
            assert await run.left(name) == 0
        elif name != "rollout-9":
            run.send(name, signal.SIGKILL)
            assert await run.left(name) == -signal.SIGKILL
    await run.more_steps(bus, 2)
    await until(lambda: _only(bus, "rollout", {"rollout-0"}), timeout_s=PATIENCE_S)


async def _only(bus: Bus, service: str, names: set[str]) -> bool:
    return await _there(bus, service) == names


async def _follow_the_leader(run: Run, bus: Bus) -> None:
    run.join("coordinator", "coordinator-spare")
    await until(lambda: _is_there(bus, "coordinator-spare"), timeout_s=PATIENCE_S)
    names = {"coordinator-0", "coordinator-spare"}
    await until(lambda: _leads(bus, *names), timeout_s=PATIENCE_S)
    leader = await _leader(bus)
    assert TTL_S * 4 / 3 < FOLLOWED_WITHIN_S, "the lease runs out, and the other asks each third of it"
    run.process.send_signal(signal.SIGSTOP)  # `up` would restart the dead one under its name, which leads at once
    try:
        assert run.send(leader, signal.SIGKILL)
        killed_s = time.monotonic()
        await until(lambda: _leads(bus, *(names - {leader})), timeout_s=PATIENCE_S)
        print(f"followed after {time.monotonic() - killed_s:.1f} s")
        await run.more_steps(bus, 4)  # more than was admitted before: max_lag is 2
    finally:
        run.process.send_signal(signal.SIGCONT)
    await run.more_steps(bus, 1)


async def _leads(bus: Bus, *names: str) -> bool:
    return await _leader(bus) in names


async def _is_there(bus: Bus, replica: str) -> bool:
    return replica in [beat.replica for beat in await heartbeats(bus)]
