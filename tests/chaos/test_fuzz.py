"""The law of hostile messages: PENSTOCK_FUZZ_MESSAGES (1,000; `make fuzz`: 20,000) on every stream,
PENSTOCK_FUZZ_SEED (7).
"""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from tests.chaos.fuzz import fuzz

MESSAGES = int(os.environ.get("PENSTOCK_FUZZ_MESSAGES", "1000"))
SEED = int(os.environ.get("PENSTOCK_FUZZ_SEED", "7"))


@pytest.mark.slow
@pytest.mark.timeout(600 + MESSAGES / 10)
async def test_no_message_ends_a_service_is_trained_or_costs_an_honest_group(tmp_path: Path) -> None:
    figures = await fuzz(tmp_path, SEED, MESSAGES)
    print(json.dumps(dataclasses.asdict(figures)))
    assert figures.messages >= MESSAGES
    assert figures.restarts == 0
    assert figures.hostile_trained == 0
    assert figures.trained_twice == 0
    assert figures.unaccounted == 0
    assert figures.honest_lost == 0
