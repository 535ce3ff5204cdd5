"""The code scorer and the real executor over ``code_corpus.py``: wrong programs score 0; solutions score 1 or their
row is refused.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import pytest

from penstock.services.reward.scorers.code.scorer import CodeTester
from penstock.shared.bus.messages import Score
from penstock.shared.errors import PermanentError
from penstock.shared.settings.rewards.scorers import CodeScorer
from tests.conftest import need
from tests.reward.scorers.test_code import fenced, group
from tests.support import code_corpus as corpus
from tests.support.code_corpus import Case
from tests.support.executor_process import Running, running

OUR_NUMPY_FORMS = {"np.array", "np.allclose", "np.array_equal"}


@pytest.fixture(scope="module")
def executor() -> Iterator[Running]:
    need("bwrap", "bubblewrap")
    with running("--internal.executor_check_s", "1000") as process:
        yield process


@pytest.fixture
async def tester(executor: Running) -> AsyncIterator[CodeTester]:
    tester = CodeTester(CodeScorer(kind="code", timeout_s=10.0, memory_mib=256, output_kib=64), executor.address)
    yield tester
    await tester.close()


async def judged(tester: CodeTester, cases: Iterable[Case]) -> dict[str, Score | str]:
    """Return each case's score, or the message that refused its row."""

    async def judge(case: Case) -> Score | str:
        try:
            (score,) = await tester.score(group(fenced(case.program), tests=case.tests))
        except PermanentError as error:
            return str(error)
        return score

    cases = list(cases)
    results = await asyncio.gather(*map(judge, cases))
    return dict(zip((case.name for case in cases), results, strict=True))


def not_worth(value: float, results: dict[str, Score | str]) -> dict[str, Score]:
    return {name: score for name, score in results.items() if isinstance(score, Score) and score.value != value}


def refused(results: dict[str, Score | str]) -> set[str]:
    return {name for name, result in results.items() if isinstance(result, str)}


async def test_no_program_that_defines_how_the_expected_value_is_made_is_worth_anything(tester: CodeTester) -> None:
    results = await judged(tester, corpus.shadowing())
    assert len(results) == 3 * 26
    assert not_worth(0.0, results) == {}
    forms = {name.split(" ", 1)[1] for name in refused(results)}
    assert forms == OUR_NUMPY_FORMS | {"repr", "type", "hash", "Point", "callable"}


@pytest.mark.slow
async def test_no_trick_and_no_forged_result_is_worth_anything(tester: CodeTester) -> None:
    results = await judged(tester, corpus.tricks())
    assert len(results) >= 300
    assert (not_worth(0.0, results), refused(results)) == ({}, set())


@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
async def test_no_trick_of_a_program_that_prints_is_worth_anything(executor: Running, tolerance: float) -> None:
    tester = CodeTester(CodeScorer(kind="code", output_kib=64, tolerance=tolerance), executor.address)
    results = await judged(tester, corpus.printing(tolerance > 0))
    assert len(results) >= 26
    assert (not_worth(0.0, results), refused(results)) == ({}, set())
    await tester.close()


async def test_no_trick_with_a_test_of_its_own_is_worth_anything(tester: CodeTester) -> None:
    results = await judged(tester, corpus.hacks())
    assert len(results) >= 50
    assert (not_worth(0.0, results), refused(results)) == ({}, set())


@pytest.mark.parametrize(("family", "least"), [(corpus.mbpp, 180), (corpus.leetcode, 60), (corpus.apps, 70)])
async def test_every_solution_of_a_dataset_is_worth_1(
    tester: CodeTester, family: Callable[[], Iterator[Case]], least: int
) -> None:
    results = await judged(tester, family())
    assert len(results) >= least
    assert (not_worth(1.0, results), refused(results)) == ({}, set())


async def test_a_computed_expected_value_is_python_s_own(tester: CodeTester) -> None:
    cases = [
        Case(form, f"def f(x):\n    return {value}", [corpus.COMPUTED[form]])
        for form, value in corpus.COMPUTED_RIGHT.items()
    ]
    assert not_worth(1.0, await judged(tester, cases)) == {}


async def test_numpy_in_asserts_needs_the_profile_and_is_numpy_s_own(executor: Running) -> None:
    tester = CodeTester(CodeScorer(kind="code", profile="numpy"), executor.address)
    tests = [corpus.COMPUTED["np.allclose"]]
    right = Case("right", "import numpy as np\ndef f(x):\n    return np.array([1, 2, 3.0])", tests)
    wrong = Case("wrong", "import numpy as np\nnp.allclose = lambda *a: True\ndef f(x):\n    return [1, 2, 4]", tests)
    results = await judged(tester, [right, wrong])
    assert [score.value for score in results.values() if isinstance(score, Score)] == [1.0, 0.0]
    await tester.close()


HEAVY = {
    "colliding set": """print('{"set": [' + ', '.join(str(n * (2**61 - 1)) for n in range(40_000)) + ']}')""",
    "colliding dict": """print('{"dict": [' + ', '.join(f'[{n * (2**61 - 1)}, 0]' for n in range(30_000)) + ']}')""",
    "lists": "print('[' + '[], ' * 240_000 + '[]]')",
    "numbers": "print('[' + '1, ' * 330_000 + '1]')",
    "decimals": """print('[{"Decimal": "1e999999"}, {"Decimal": "1e-999999"}]')""",
    "deep": "print('[' * 500_000)",
}


@pytest.mark.slow
@pytest.mark.parametrize("heavy", HEAVY)
@pytest.mark.parametrize("test", ["assert set(f(1)) == {1, 2}", "assert f(1) == [1]"])
async def test_no_result_keeps_the_service_from_its_other_work(executor: Running, heavy: str, test: str) -> None:
    tester = CodeTester(CodeScorer(kind="code", timeout_s=5.0), executor.address)
    program = f"import io, os\nfrom contextlib import redirect_stdout\ndef f(x):\n    text = io.StringIO()\n    with redirect_stdout(text):\n        {HEAVY[heavy]}\n" \
        "    data = b'value ' + text.getvalue().encode()\n    while data:\n        data = data[os.write(3, data):]\n    os._exit(0)"  # fmt: skip
    scored = asyncio.create_task(judged(tester, [Case("heavy", program, [test])]))
    longest_cpu_s, before_s = 0.0, time.thread_time()
    while not scored.done():
        await asyncio.sleep(0.001)
        now_s = time.thread_time()
        longest_cpu_s, before_s = max(longest_cpu_s, now_s - before_s), now_s
    assert not_worth(0.0, await scored) == {}
    assert longest_cpu_s < 3  # seconds of this thread between two turns of the loop; 9 if a set is built here
    await tester.close()


def test_the_corpus_names_each_case_once() -> None:
    cases = itertools.chain(
        corpus.shadowing(), corpus.tricks(), corpus.hacks(), corpus.mbpp(), corpus.leetcode(), corpus.apps()
    )
    names = [case.name for case in cases]
    assert len(names) == len(set(names))
