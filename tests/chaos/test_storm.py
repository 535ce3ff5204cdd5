"""The storm: PENSTOCK_STORM_S seconds of faults (90; in CI 300; `make storm`: 1,800), PENSTOCK_STORM_SEED (6)."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from tests.chaos.storm import storm

LENGTH_S = float(os.environ.get("PENSTOCK_STORM_S", "300" if os.environ.get("CI") == "true" else "90"))
SEED = int(os.environ.get("PENSTOCK_STORM_SEED", "6"))


@pytest.mark.slow
@pytest.mark.timeout(LENGTH_S + 900)
async def test_in_a_storm_nothing_is_lost_nothing_is_trained_twice_and_learning_goes_on(tmp_path: Path) -> None:
    figures = await storm(tmp_path, SEED, LENGTH_S)
    print(json.dumps(dataclasses.asdict(figures)))
    assert figures.groups_lost == 0
    assert figures.steps > 0
    assert figures.reward_last >= figures.reward_first
