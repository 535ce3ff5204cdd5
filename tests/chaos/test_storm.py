"""The storm: each fault PENSTOCK_STORM_ROUNDS times (1), with PENSTOCK_STORM_SEED (6), and with PENSTOCK_STORM_SHELVES=1 all
payloads on shelves; `make storm`: for 30 minutes.
"""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from tests.chaos.storm import storm

ROUNDS = int(os.environ.get("PENSTOCK_STORM_ROUNDS", "1"))
SEED = int(os.environ.get("PENSTOCK_STORM_SEED", "6"))
SHELVES = os.environ.get("PENSTOCK_STORM_SHELVES") == "1"


@pytest.mark.slow
@pytest.mark.timeout(600 * ROUNDS + 900)
@pytest.mark.parametrize("with_episodes", [False, True])
async def test_in_a_storm_nothing_is_lost_nothing_is_trained_twice_and_learning_goes_on(
    tmp_path: Path, *, with_episodes: bool
) -> None:
    figures = await storm(tmp_path, SEED, rounds=ROUNDS, with_episodes=with_episodes, with_shelves=SHELVES, forked=True)
    print(json.dumps(dataclasses.asdict(figures)))
    assert set(figures.faults.values()) == {ROUNDS}
    assert figures.groups_lost == 0
    assert figures.steps > 0
    assert with_episodes or figures.reward_last >= figures.reward_first, "agents learn in test_calculator.py, in longer"
