"""A leader killed or frozen in the middle of a rollback, a pause, an evaluation: `benchmarks/bus/leader.py` strikes more often."""

from pathlib import Path

import pytest

from tests.chaos.leader import strike

SEEDS = (0, 2, 4)
"""A rollback, an evaluation, and any moment."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_struck_leader_leaves_each_step_once_in_every_record(tmp_path: Path, seed: int) -> None:
    struck = await strike(tmp_path, seed)
    assert struck.steps > 0
    assert struck.terms >= 2, "another term has led"
