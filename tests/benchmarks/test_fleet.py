"""Laws of a fleet of which some replicas are killed at once."""

import argparse
import asyncio

import pytest

from benchmarks.bus import fleet
from tests.conftest import PATIENCE_S

pytestmark = pytest.mark.timeout(600)  # among the first: it waits for a minute


def test_what_killed_replicas_held_is_decoded_once_more_by_others_and_each_group_is_trained_once() -> None:
    """Living replicas keep their leases on a busy machine, and have no room for all samples."""
    given = argparse.Namespace(replicas=[40], killed=16, held=16, seconds=60.0, claim_after_s=20.0, window_s=PATIENCE_S)
    with fleet.serving() as url:
        counts = asyncio.run(fleet.kills(url, given))
    assert counts["samples_held_by_killed"] >= 8
    assert counts["recovery_s_longest"] < float("inf")
    assert counts["tokens_decoded_twice"] <= counts["tokens_in_flight"]
    assert counts["samples_begun_twice_by_living"] == 0
    assert counts["trained_once"] == counts["admitted"] == 80
