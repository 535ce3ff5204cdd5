"""Fixtures of the command line's tests."""

import contextlib
import functools
from collections.abc import Iterator

import pytest

from penstock.services.cli.cluster import deployment
from penstock.services.cli.reports import ended_run
from penstock.services.cli.reports.ended_run import EndedRun


@pytest.fixture(scope="module")
def served_once() -> Iterator[None]:
    """Serve the records of a run to all commands: each would start a process of its own."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as ends:
        patch.setattr(ended_run, "end_later", lambda process: ends.callback(deployment._end, process))
        patch.setattr(EndedRun, "_serve", functools.cache(EndedRun._serve))
        yield
