"""A run whose payloads are all on shelves: kills lose nothing, and what is lost with every copy is generated again."""

import functools
import shutil
import signal
from pathlib import Path

import pytest

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import PAYLOADS
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import Run, left_behind, running

FLAGS = {"bus.shelve_above_bytes": 1, "rollout.replicas": 2}


async def _claims(bus: Bus) -> bool:
    held = await bus.hgetall(PAYLOADS)
    return bool(held) and all(b"claim" in data[:20] for data in held.values())


async def _gone(bus: Bus, held: set[bytes]) -> bool:
    return not held & (await bus.hgetall(PAYLOADS)).keys()


def _lose_every_copy(run: Run) -> None:
    for folder in (run.folder / "shelf").iterdir():
        shutil.rmtree(folder, ignore_errors=True)


async def _lost(bus: Bus) -> int:
    return (await bus.counts()).get("unavailable", 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_killed_holders_lose_nothing_and_lost_copies_only_their_groups(tmp_path: Path) -> None:
    async with running(tmp_path, flags=FLAGS) as run:
        bus = await run.connect()
        await run.more_steps(bus, 2)
        await run.until(lambda: _claims(bus))
        for name in ("rollout-0", "rollout-1"):
            await run.until(functools.partial(run.send, name, signal.SIGKILL))
            shutil.rmtree(run.folder / "shelf" / name, ignore_errors=True)
            await run.more_steps(bus, 2)
            held = set(await bus.hgetall(PAYLOADS))
            await run.until(functools.partial(_gone, bus, held))  # they have one copy only
        assert await _lost(bus) == 0, "each payload of a host that is gone has a copy elsewhere"
        await run.until(lambda: run.send("trainer-0", signal.SIGKILL))
        await run.more_steps(bus, 2)
        while not await _lost(bus):
            _lose_every_copy(run)
            await run.more_steps(bus, 1)
        await run.more_steps(bus, 3)
        await bus.close()
        await run.stop()
        async with left_behind(run) as bus:
            counts = await audit_groups(bus)
            assert counts["unavailable"] > 0
            assert not any(name.startswith("dead:") for name in counts)
            await audit_versions(bus)
        assert not (run.folder / "shelf").exists(), "nothing is left of a run that has ended"
