"""Fixtures: on a busy machine, processes start and answer late."""

from collections.abc import Iterator

import pytest

from penstock.services.reward.executor import program, zygote_process
from penstock.services.reward.subprocess_pool import pool
from penstock.shared.executor import client
from tests.conftest import PATIENCE_S


@pytest.fixture(autouse=True, scope="session")
def _patient_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pool, "START_WITHIN_S", PATIENCE_S)
        patched.setattr(pool, "PATIENCE", 1000)
        patched.setattr(client, "CONNECT_WITHIN_S", PATIENCE_S)
        patched.setattr(zygote_process, "START_WITHIN_S", PATIENCE_S)
        patched.setattr(program, "REACTS_WITHIN_S", PATIENCE_S)
        yield
