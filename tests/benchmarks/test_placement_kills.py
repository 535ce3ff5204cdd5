"""Laws of the campaign of kills."""

import doctest
import itertools
import subprocess
import sys
from pathlib import Path

from benchmarks import placement_kills
from benchmarks.placement_kills import jobs

_WITHOUT_TEST_FRAMEWORKS = """
import sys
sys.modules.update(dict.fromkeys(("pytest", "hypothesis")))
import benchmarks.placement_kills
"""


def test_the_examples_in_its_docstrings_hold() -> None:
    results = doctest.testmod(placement_kills)
    assert results.attempted >= 3
    assert results.failed == 0


def test_every_rung_has_as_many_runs_as_another_whenever_the_time_is_over() -> None:
    endless = itertools.islice(jobs(1, [0, 1, 2], 0), 60)
    assert {job.rung for job in itertools.islice(endless, 3)} == {0, 1, 2}
    limited = list(jobs(1, [0, 1, 2, 3, 4], 5))
    assert len({str(job) for job in limited}) == len(limited) == 25


def test_it_is_imported_where_no_test_framework_is_installed() -> None:
    command = [sys.executable, "-c", _WITHOUT_TEST_FRAMEWORKS]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
