"""Trainer and replica share a device: whichever is killed in a switch, or hangs, no device is held twice and no group lost."""

from pathlib import Path

import pytest

from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import left_behind, running
from tests.chaos.switches import HOLDERS, SHARED, hang, kill_in_a_switch


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_holder_that_is_killed_in_a_switch_or_hangs_loses_its_device_and_nothing_else(tmp_path: Path) -> None:
    async with running(tmp_path, flags=SHARED) as run:
        bus = await run.connect()
        await run.more_steps(bus, 2)
        for victim in ("rollout-0", "trainer-0"):
            await kill_in_a_switch(run, bus, victim)
            await run.more_steps(bus, 2)
        for name, phase in HOLDERS:
            await hang(run, bus, name, phase)
            await run.more_steps(bus, 2)
        await bus.close()
        await run.stop()
    async with left_behind(run) as bus:
        await audit_groups(bus)
        await audit_versions(bus)
