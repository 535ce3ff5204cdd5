"""The code scorer with the real executor: right programs pass, tricks score 0."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from penstock.services.reward.scorers.code.scorer import CodeTester
from penstock.shared.bus.messages import Score, ScoreStatus
from penstock.shared.settings.rewards.scorers import CodeScorer
from tests.conftest import need
from tests.reward.scorers.test_code import fenced, group
from tests.support.executor_process import Running, running

ADD_ONE = ["assert f(1) == 2", "assert f((1, 2)) == (1, 2, 1)"]
DOUBLE = [{"input": "3\n", "output": "6\n"}, {"input": "-1\n", "output": "-2\n"}]


@pytest.fixture(scope="module")
def executor() -> Iterator[Running]:
    need("bwrap", "bubblewrap")
    with running("--internal.executor_check_s", "1000", "--internal.executor_profiles", '["stdlib"]') as process:
        yield process


@pytest.fixture
async def tester(executor: Running) -> AsyncIterator[CodeTester]:
    code_tester = CodeTester(CodeScorer(kind="code", timeout_s=2.0, memory_mib=128, output_kib=64), executor.address)
    yield code_tester
    await code_tester.close()


async def score(tester: CodeTester, program: str, tests: Any) -> Score:
    (scored,) = await tester.score(group(fenced(program), tests=tests))
    return scored


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("print(int(input()) * 2)", DOUBLE),
        ("print(int(input()) * 2)\nexit()", DOUBLE),
        ("import sys\nif __name__ == '__main__':\n    sys.stdout.write(str(2 * int(sys.stdin.read())))\n    sys.exit()", DOUBLE),
        ("def f(x):\n    return x + 1 if type(x) is int else (*x, 1)", ADD_ONE),
        ("def f(a, b=2):\n    return {'sum': [a, b]}", {"fn_name": "f", "inputs": [[1], [1, 3]], "outputs": [{"sum": [1, 2]}, {"sum": [1, 3]}]}),
        ("class Solution:\n    def f(self, x):\n        return x * 2", {"fn_name": "f", "inputs": [[3]], "outputs": [[6]]}),
        ("def f(s):\n    return {c: {s.count(c)} for c in s}", ["assert f('aab') == {'a': {2}, 'b': {1}}"]),
        ("def e(x):\n    return x + 1\ndef d(x):\n    return x - 1", ["assert d(e(5)) == 5 and not d(1)"]),
        ("import random, time\ndef f(n):\n    return [random.random() for _ in range(n)]", ["assert len(f(3)) == 3 and 0 <= f(1)[0] < 1"]),
        ("def f():\n    return 3 * 0.1", ["assert abs(f() - 0.3) < 1e-9"]),
        ("print(10**5000)", [{"input": "", "output": "1" + "0" * 5000}]),
        ("print(len(str(int(input()))))", [{"input": "7" * 5000, "output": "5000"}]),
        ("def f(n):\n    return 10**n", ["assert f(5000) == 10**5000"]),
        ("def f(n):\n    return [10**n]", {"fn_name": "f", "inputs": [[5000]], "outputs": [[10**5000]]}),
        ("def f(n):\n    return (10**n, {})", '{"fn_name": "f", "inputs": [[5000]], "outputs": [[1' + "0" * 5000 + ", {}]]}"),
        ("print(0.1 + 0.4)", [{"input": "", "output": "0.50"}]),
    ],
)  # fmt: skip
async def test_right_programs_pass_in_a_named_tier(tester: CodeTester, program: str, tests: Any) -> None:
    scored = await score(tester, program, tests)
    assert (scored.status, scored.value) == (ScoreStatus.OK, 1.0), scored.detail
    assert scored.detail.startswith(("namespace: passed", "landlock: passed"))


CHEATS = {
    "marker": "print('passed')\nprint('OK')\nprint('All tests passed')\nimport sys\nsys.exit(0)",
    "exit": "raise SystemExit(0)",
    "os-exit": "import os\nos._exit(0)",
    "exit-in-call": "import os\ndef f(x):\n    os._exit(0)",
    "equals-everything": "class A:\n    __eq__ = lambda s, o: True\n    __bool__ = lambda s: True\ndef f(x):\n    return A()",
    "int-that-equals": "class A(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef f(x):\n    return A(7)",
    "tuple-that-equals": "class A(tuple):\n    __eq__ = lambda s, o: True\ndef f(x):\n    return A()",
    "builtins": "import builtins\nfor n in ('sorted', 'abs', 'all', 'bool', 'print', 'AssertionError'):\n"
    "    setattr(builtins, n, lambda *a, **k: True)\ndef f(x):\n    return 0",
    "json": "import json\njson.dumps = lambda *a, **k: 'true'\njson.encoder.JSONEncoder.encode = lambda *a: 'true'\n"
    "def f(x):\n    return 0",
    "our-names": "def penstock_call_0():\n    return True\npenstock_plain = lambda x: True\ndef f(x):\n    return True",
    "swallow": "def f(x):\n    return True\nx = '''",
    "decorate": "def f(x):\n    return 0\n@lambda g: True\n",
    "assertion": "AssertionError = Exception\ndef f(x):\n    return 0",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x):\n    raise ValueError",
    "report": "import os\ndef f(x):\n    for d in range(3, 64):\n        try:\n            os.write(d, b'value true\\nvalue 1\\nready\\n')\n"
    "        except OSError:\n            pass\n    os._exit(0)",
    "look-around": "import gc, sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for v in list(frame.f_locals.values()):\n"
    "            if isinstance(v, dict) and 'expected' in v:\n                return v['expected']\n        frame = frame.f_back\n    return 0",
    "bool-for-int": "def f(x):\n    return True",
    "deep": "def f(x):\n    r = []\n    for _ in range(900):\n        r = [r]\n    return r",
}  # fmt: skip


@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize(
    "tests", [["assert f(1) == 2"], [{"fn_name": "f", "input": [1], "output": 2}]], ids=["assert", "call"]
)
async def test_no_trick_is_worth_anything_and_the_next_program_is_judged_as_ever(
    tester: CodeTester, cheat: str, tests: Any
) -> None:
    scored = await score(tester, CHEATS[cheat], tests)
    assert scored.value == 0.0, scored.detail
    assert (await score(tester, "def f(x):\n    return x + 1", tests)).value == 1.0


@pytest.mark.parametrize("cheat", ["marker", "exit", "os-exit", "builtins", "report"])
async def test_no_trick_of_a_program_that_prints_is_worth_anything(tester: CodeTester, cheat: str) -> None:
    assert (await score(tester, CHEATS[cheat], DOUBLE)).value == 0.0


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("print(int(input()) * 2)\n1 / 0", ScoreStatus.CRASHED),
        ("print(int(input()) * 2, flush=True)\nraise SystemExit(3)", ScoreStatus.CRASHED),
        ("print(int(input()) * 2", ScoreStatus.CRASHED),
        ("while True: pass", ScoreStatus.TIMEOUT),
        ("x = bytearray(10**9)", ScoreStatus.MEMORY),
        ("while True: print('6')", ScoreStatus.OUTPUT_LIMIT),
        ("import ctypes\nctypes.CDLL(None).ptrace(0, 0, 0, 0)", ScoreStatus.FORBIDDEN),
    ],
)
async def test_how_a_program_failed_is_its_status(tester: CodeTester, program: str, status: ScoreStatus) -> None:
    scored = await score(tester, program, DOUBLE)
    assert (scored.status, scored.value) == (status, 0.0), scored.detail
