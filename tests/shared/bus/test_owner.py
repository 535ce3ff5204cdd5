"""Laws of the release that a run's keys belong to."""

import pytest

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.run.owner import claim
from penstock.shared.errors import SettingsError


async def test_two_releases_cannot_share_a_runs_keys(bus: Bus) -> None:
    await claim(bus, "grpo", "")
    await claim(bus, "grpo", "research/grpo")
    await claim(bus, "grpo", "research/grpo")
    with pytest.raises(SettingsError) as refused:
        await claim(bus, "grpo", "team-b/grpo")
    assert str(refused.value) == (
        "expected the run 'grpo' on this bus to belong to the release team-b/grpo, found that it belongs to research/grpo: set run.id to "
        f"another name, or, if research/grpo is gone, delete the key {bus.keys.named('owner')}"
    )
