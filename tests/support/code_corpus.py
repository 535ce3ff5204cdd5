"""Programs for the code scorer: wrong ones, which must score 0, and solutions, which must score 1.

Wrong ones combine tricks with tests. Right ones are families of problems in the forms of MBPP, APPS and LeetCode;
Python computes their expected values.
"""

import collections
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.services.reward.executor.inside import runner


class Case(NamedTuple):
    name: str
    program: str
    tests: Any


# ---------------------------------------------------------------- expected values that are computed

COMPUTED = {
    "Decimal": "assert f(3) == Decimal('1.50')",
    "Fraction": "assert f(3) == Fraction(1, 3)",
    "Counter": "assert f([1, 1, 2]) == Counter({1: 2, 2: 1})",
    "Counter-both": "assert Counter(f(1)) == Counter([1, 2])",
    "math.sqrt": "assert f(9) == math.sqrt(9)",
    "math.factorial": "assert f(5) == math.factorial(5)",
    "pow": "assert f(5) == pow(2, 5)",
    "math.isnan": "assert math.isnan(f(1))",
    "deque": "assert f(1) == deque([1, 2, 3])",
    "np.array": "assert f(1) == np.array([1, 2, 3])",
    "np.allclose": "assert np.allclose(f(1), [1, 2, 3])",
    "np.array_equal": "assert np.array_equal(f(1), np.array([1, 2]))",
    "datetime.date": "assert f(1) == datetime.date(2020, 1, 2)",
    "repr": "assert repr(f(1)) == '2'",
    "type": "assert type(f(1)) == str",
    "ord": "assert f('a') == ord('a')",
    "hash": "assert hash(f(1)) == hash((1, 2))",
    "json.loads": "assert f(1) == json.loads('[1, 2]')",
    "textwrap.dedent": "assert f(1) == textwrap.dedent('secret text')",
    "Point": "assert f(2) == Point(1, 2)",
    "callable": "assert callable(f(1))",
    "bytes": "assert f(2) == bytes([1, 2])",
    "complex": "assert f(2) == complex(1, 2)",
    "enumerate": "assert f(2) == enumerate([3, 4])",
    "divmod": "assert f(2) == divmod(7, 2)",
    "bin": "assert f(2) == bin(5)",
}
COMPUTED_RIGHT = {
    "Decimal": "Decimal('1.5')",
    "Fraction": "Fraction(1, 3)",
    "Counter": "Counter(x)",
    "Counter-both": "[2, 1]",
    "math.sqrt": "3",
    "math.factorial": "120",
    "pow": "2 ** x",
    "math.isnan": "float('nan')",
    "deque": "deque([1, 2, 3])",
    "datetime.date": "datetime.date(2020, 1, 2)",
    "ord": "97",
    "json.loads": "[1, 2]",
    "textwrap.dedent": "'secret text'",
    "bytes": "b'\\x01\\x02'",
    "complex": "1 + 2j",
    "divmod": "(3, 1)",
    "bin": "'0b101'",
}


def shadowing() -> Iterator[Case]:
    """Programs that redefine the name that makes the expected value."""
    for form, test in COMPUTED.items():
        root = form.partition("-")[0].partition(".")[0]
        attribute = form.partition(".")[2] or "x"
        yield Case(f"function {form}", f"def {root}(*a, **k):\n    return 7\ndef f(x):\n    return 7", [test])
        yield Case(
            f"object {form}",
            f"class Any:\n    def __call__(self, *a, **k):\n        return 7\n    def {attribute}(self, *a, **k):\n        return 7\n"
            f"    def __eq__(self, other):\n        return True\n    __hash__ = None\n{root} = Any()\ndef f(x):\n    return 7",
            [test],
        )
        yield Case(
            f"builtins {form}", f"import builtins\nbuiltins.{root} = lambda *a, **k: 7\ndef f(x):\n    return 7", [test]
        )


# ---------------------------------------------------------------- tricks

TRICKS = {
    "exit": "import sys\ndef f(*a):\n    sys.exit(0)",
    "exit-import": "raise SystemExit(0)",
    "os-exit": "import os\ndef f(*a):\n    os._exit(0)",
    "exit-256": "def f(*a):\n    raise SystemExit(256)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(*a):\n    raise ValueError",
    "kill-itself": "import os, signal\ndef f(*a):\n    os.kill(os.getpid(), signal.SIGTERM)",
    "eq-object": "class A:\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n    __hash__ = None\ndef f(*a):\n    return A()",
    "eq-metaclass": "class M(type):\n    __eq__ = lambda s, o: True\n    __hash__ = type.__hash__\nclass A(metaclass=M):\n    pass\ndef f(*a):\n    return A",
    "no-return": "def f(*a):\n    pass",
    "not-implemented": "def f(*a):\n    return NotImplemented",
    "itself": "def f(*a):\n    return f",
    "not-defined": "x = 1",
    "deleted": "def f(*a):\n    return 1\ndel f",
    "syntax": "def f(*a:\n    return 1",
    "swallow": "def f(*a):\n    return 1\nx = '''",
    "decorated": "def f(*a):\n    return 'no'\n@lambda g: True\n",
    "coroutine": "async def f(*a):\n    return 1",
    "infinite-generator": "def f(*a):\n    while True:\n        yield 1",
    "deep": "def f(*a):\n    r = []\n    for _ in range(5000):\n        r = [r]\n    return r",
    "circular": "def f(*a):\n    r = []\n    r.append(r)\n    return r",
    "mock": "from unittest.mock import MagicMock, ANY\ndef f(*a):\n    return ANY",
    "our-names": "call_0 = given_0 = True\ndef penstock_call_0():\n    return True\nholds = matches = lambda *a: ''\ndef f(*a):\n    return 'no'",
    "our-modules": "import sys\nfor name in ('inside.comparison', 'inside.plain_data', 'inside.runner'):\n    m = sys.modules.get(name)\n"
    "    for n in list(vars(m) if m else ()):\n        if n[0] != '_':\n            setattr(m, n, lambda *a, **k: '')\ndef f(*a):\n    return 'no'",
    "patched-builtins": "import builtins\nfor n in ('sorted', 'abs', 'all', 'any', 'bool', 'len', 'set', 'isinstance', 'print', 'AssertionError'):\n"
    "    setattr(builtins, n, lambda *a, **k: True)\ndef f(*a):\n    return 'no'",
    "patched-json": "import json\njson.dumps = lambda *a, **k: 'true'\njson.loads = lambda *a, **k: True\ndef f(*a):\n    return 'no'",
    "patched-math": "import math\nmath.isclose = math.isnan = lambda *a, **k: True\ndef f(*a):\n    return 'no'",
    "patched-write": "import os\nw = os.write\nos.write = lambda d, b: w(d, b'value true\\n') and len(b)\ndef f(*a):\n    return 'no'",
    "report-true": "import os\ndef f(*a):\n    os.write(3, b'value true\\n')\n    os._exit(0)",
    "report-ready": "import os\nos.write(3, b'ready\\nvalue true\\n')\ndef f(*a):\n    os._exit(0)",
    "report-many": "import os\ndef f(*a):\n    os.write(3, b'value 1\\n' * 5)\n    os._exit(0)",
    "report-no-json": "import os\ndef f(*a):\n    os.write(3, b'value object()\\n')\n    os._exit(0)",
    "report-error": "import os\ndef f(*a):\n    os.write(3, b'error passed\\n')\n    os._exit(0)",
    "report-all": "import os\ndef f(*a):\n    for d in range(64):\n        try:\n            os.write(d, b'value true\\n')\n        except OSError:\n            pass\n    os._exit(0)",
    "close-report": "import os\ndef f(*a):\n    os.close(3)\n    return 1",
    "frames": "import sys\ndef f(*a):\n    g = sys._getframe()\n    seen = ''\n    while g:\n        seen += repr(g.f_locals) + repr(g.f_code.co_consts)\n        g = g.f_back\n    return seen",
    "gc": "import gc\ndef f(*a):\n    return [str(o)[:50] for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o][:9]",
    "raise": "def f(*a):\n    raise AssertionError",
    "assertion": "AssertionError = Exception\ndef f(*a):\n    return 'no'",
    "printed": "print('passed'); print('OK')\ndef f(*a):\n    print(True)",
    "homoglyph": "def f(*a):\n    return '\\u0435xpected'",
}  # fmt: skip
FORGED = (
    '{"set": [[1]]}', '{"tuple": 3}', '{"tuple": [], "set": []}', '{"dict": [1]}', '{"dict": [[1, 2, 3]]}', '{"object": 1}', '{}', "NaN", "-Infinity",
    '{"iterator": 3}', '{"int": "zz"}', '{"Decimal": "sNaN"}', '{"Fraction": ["0x1", "0x0"]}', '{"range": [0, 1, 0]}', '{"deque": 5}',
    '{"dict_keys": [[1]]}', '{"bytes": "zz"}', '{"datetime": "now"}', '{"complex": ["a"]}', "[" * 3000, '{"__class__": "A", "__eq__": true}',
)  # fmt: skip
PROBES = (
    ["assert f(3) == 17"],
    ["assert sorted(f([2, 1])) == [1, 2]", "assert f([2, 1])[0] == 1"],
    ["assert abs(f(2) - 0.25) < 1e-9"],
    ["assert Counter(f('ab')) == Counter('ab')", "assert len(f('ab')) == 2"],
    [{"fn_name": "f", "input": [3], "output": [17, 18]}],
)


def tricks() -> Iterator[Case]:
    forged = {
        f"forged {text[:20]}": f"import os\ndef f(*a):\n    os.write(3, b'value ' + {text!r}.encode() + b'\\n')\n    os._exit(0)"
        for text in FORGED
    }
    programs = {**TRICKS, **forged}
    for (name, program), (place, tests) in itertools.product(programs.items(), enumerate(PROBES)):
        yield Case(f"{name} on {place}", program, tests)


PRINTING = {
    "nothing": "",
    "exit": "import sys\nsys.exit(0)",
    "os-exit": "import os\nos._exit(0)",
    "exit-256": "print(6)\nraise SystemExit(256)",
    "exit-3": "print(6, flush=True)\nraise SystemExit(3)",
    "error-after": "print(6)\n1 / 0",
    "passed": "print('passed')",
    "many": "for n in range(-20, 20): print(n)",
    "fullwidth": "print('\\uff16')",
    "nul": "print('6\\0')",
    "mark": "print('6\\u200f')",
    "bom": "print('\\ufeff6')",
    "carriage": "print('junk\\r6')",
    "backspace": "print('7\\b6')",
    "separator": "print('6\\u2028junk')",
    "form-feed": "print('6\\fjunk')",
    "underscore": "print('0_6')",
    "nan": "print('nan')",
    "inf": "print('inf')",
    "1e400": "print('1e400')",
    "1e999": "print('-1e999')",
    "atexit": "import atexit\natexit.register(print, 7)\nprint(6)",
    "os-write": "import os\nos.write(3, b'value 6\\n')",
    "input": "print(input())",
    "two-lines": "print(6)\nprint(6)",
    "two-words": "print(6, 6)",
}


def printing(tolerance: bool) -> Iterator[Case]:
    """Programs that print something other than the expected 6, or 1 with 400 zeros."""
    for name, program in PRINTING.items():
        for expected in ("6\n", "1" + "0" * 400) if tolerance else ("6\n",):
            yield Case(f"printing {name} for {expected[:3]}", program, [{"input": "3\n", "output": expected}])


# ---------------------------------------------------------------- right programs


def _asserts(
    name: str, program: str, inputs: tuple[Any, ...], form: str = "assert {name}({arguments}) == {expected}"
) -> Case:
    """Return a case whose expected values are computed by running the program here."""
    names = runner.prelude()
    exec(program, names)
    tests = []
    for arguments in inputs:
        expected = names[name](*arguments)
        written = ", ".join(map(repr, arguments))
        tests.append(form.format(name=name, arguments=written, expected=repr(expected)))
    return Case(name, program, tests)


def mbpp() -> Iterator[Case]:
    for n in range(2, 14):
        yield _asserts(f"nth_multiple_{n}", f"def nth_multiple_{n}(k):\n    return {n} * k", ((3,), (0,), (-2,)))
        yield _asserts(
            f"remove_every_{n}",
            f"def remove_every_{n}(xs):\n    return [x for i, x in enumerate(xs, 1) if i % {n}]",
            (([*range(15)],), ([],)),
        )
        yield _asserts(
            f"is_divisible_by_{n}",
            f"def is_divisible_by_{n}(x):\n    return True if x % {n} == 0 else False",
            ((12,), (7,), (0,)),
        )
        yield _asserts(
            f"largest_{n}",
            f"import heapq as hq\ndef largest_{n}(xs):\n    return hq.nlargest({n}, xs)",
            (([5, 3, 9, 1, 14, 2, 2],), ([1, 2],)),
        )
        yield _asserts(
            f"pairs_{n}",
            f"from itertools import combinations\ndef pairs_{n}(xs):\n    return [c for c in combinations(xs, 2) if sum(c) > {n}]",
            (([1, 2, 3, 4, 9],), ([1],)),
        )
        yield _asserts(
            f"chunks_{n}",
            f"def chunks_{n}(t):\n    return tuple(t[i:i + {n}] for i in range(0, len(t), {n}))",
            ((tuple(range(9)),), ("abcdefgh",)),
        )
        yield _asserts(
            f"words_of_{n}",
            f"import re\ndef words_of_{n}(text):\n    return re.findall(r'\\b\\w{{{n}}}\\b', text)",
            (("a bc def ghij klmno is it so",), ("",)),
        )
        yield _asserts(
            f"freq_{n}",
            f"import collections\ndef freq_{n}(xs):\n    return collections.Counter(x % {n} for x in xs)",
            (([1, 2, 3, 4, 5, 12],), ([],)),
            "assert {name}({arguments}) == dict({expected})",
        )
        yield Case(
            f"group_{n}",
            f"from collections import defaultdict\ndef group_{n}(xs):\n    d = defaultdict(list)\n    for x in xs:\n        d[x % {n}].append(x)\n    return d",
            [f"assert group_{n}([1, 2, {n}]) == {_grouped([1, 2, n], n)!r}"],
        )
        yield Case(
            f"common_{n}",
            f"def common_{n}(a, b):\n    return tuple(set(a) & set(b))",
            [f"assert set(common_{n}((3, 4, {n}), (5, 4, {n}))) == set((4, {n}))"],
        )
        yield Case(
            f"mapped_{n}",
            f"def mapped_{n}(xs):\n    return map(lambda x: x * {n}, xs)",
            [f"assert list(mapped_{n}([1, 2])) == [{n}, {2 * n}]"],
        )
        yield Case(
            f"close_{n}",
            f"def close_{n}(x):\n    return x / {n}",
            [
                f"assert math.isclose(close_{n}(1), {1 / n!r}, rel_tol=0.001)",
                f"assert abs(close_{n}(2) - 2 / {n}) < 1e-6",
            ],
        )
        yield Case(
            f"power_{n}",
            f"def power_{n}(x):\n    return x ** {n}",
            [
                f"assert power_{n}(2) == pow(2, {n})",
                f"assert power_{n}(3) == 3 ** {n}",
                f"assert power_{n}(2.0) == {2**n}",
            ],
        )
        yield Case(
            f"root_{n}",
            f"def root_{n}(x):\n    return (x * {n}) ** 0.5",
            [f"assert round(root_{n}(3), 6) == round(math.sqrt({3 * n}), 6)"],
        )
        yield Case(
            f"keys_{n}",
            f"def keys_{n}(d):\n    return {{k: v for k, v in d.items() if v > {n}}}.keys()",
            [f"assert sorted(keys_{n}({{'b': {n + 1}, 'a': {n + 2}, 'c': 0}})) == ['a', 'b']"],
        )
        yield Case(
            f"truth_{n}",
            f"def truth_{n}(x):\n    return int(x > {n})",
            [f"assert truth_{n}({n + 1}) == True", f"assert not truth_{n}({n})"],
        )


def _grouped(xs: list[int], n: int) -> dict[int, list[int]]:
    groups = collections.defaultdict(list)
    for x in xs:
        groups[x % n].append(x)
    return dict(groups)


_SOLUTIONS: dict[str, tuple[str, str, list[Any]]] = {
    "twoSum": ("nums: List[int], target: int) -> List[int]", "seen = {}\nfor i, x in enumerate(nums):\n    if target - x in seen:\n        return [seen[target - x], i]\n    seen[x] = i", [([2, 7, 11, 15], 9), ([3, 3], 6)]),
    "isValid": ("s: str) -> bool", "stack = []\nfor c in s:\n    if c in '([{':\n        stack.append(c)\n    elif not stack or '([{'[')]}'.index(c)] != stack.pop():\n        return False\nreturn not stack", [("()[]{}",), ("(]",)]),
    "maxSubArray": ("nums: List[int]) -> int", "return max(accumulate(nums, lambda a, x: max(a + x, x)))", [([-2, 1, -3, 4, -1, 2, 1, -5, 4],), ([-1],)]),
    "climbStairs": ("n: int) -> int", "@lru_cache(None)\ndef go(k):\n    return 1 if k < 2 else go(k - 1) + go(k - 2)\nreturn go(n)", [(2,), (30,)]),
    "groupAnagrams": ("strs: List[str]) -> List[List[str]]", "d = defaultdict(list)\nfor s in strs:\n    d[''.join(sorted(s))].append(s)\nreturn list(d.values())", [(["eat", "tea", "tan", "ate", "nat", "bat"],)]),
    "topKFrequent": ("nums: List[int], k: int) -> List[int]", "return [x for x, _ in Counter(nums).most_common(k)]", [([1, 1, 1, 2, 2, 3], 2)]),
    "lengthOfLIS": ("nums: List[int]) -> int", "tails = []\nfor x in nums:\n    i = bisect_left(tails, x)\n    tails[i:i + 1] = [x]\nreturn len(tails)", [([10, 9, 2, 5, 3, 7, 101, 18],)]),
    "findKthLargest": ("nums: List[int], k: int) -> int", "return heapq.nlargest(k, nums)[-1]", [([3, 2, 1, 5, 6, 4], 2)]),
    "permute": ("nums: List[int]) -> List[List[int]]", "return [list(p) for p in permutations(nums)]", [([1, 2, 3],), ([0],)]),
    "gcdOfStrings": ("a: str, b: str) -> str", "return a[:gcd(len(a), len(b))] if a + b == b + a else ''", [("ABCABC", "ABC"), ("LEET", "CODE")]),
    "search": ("nums: List[int], target: int) -> Optional[int]", "i = bisect.bisect_left(nums, target)\nreturn i if i < len(nums) and nums[i] == target else None", [([1, 3, 5], 5), ([1, 3], 2)]),
    "maxSlidingWindow": ("nums: List[int], k: int) -> List[int]", "q, out = deque(), []\nfor i, x in enumerate(nums):\n    while q and nums[q[-1]] <= x:\n        q.pop()\n    q.append(i)\n    if q[0] == i - k:\n        q.popleft()\n    if i >= k - 1:\n        out.append(nums[q[0]])\nreturn out", [([1, 3, -1, -3, 5, 3, 6, 7], 3)]),
    "minCost": ("costs: List[int]) -> float", "return min(costs, default=math.inf) / 2", [([4, 6],), ([7, 3],)]),
}  # fmt: skip


def leetcode() -> Iterator[Case]:
    """Methods of ``Solution`` with undefined annotations, called by ``fn_name``, by asserts, and as bare functions."""
    for name, (signature, body, inputs) in _SOLUTIONS.items():
        names = runner.prelude()
        function = f"def {name}({signature}:\n" + "".join(f"    {line}\n" for line in body.split("\n"))
        method = "class Solution:\n" + "".join(
            f"    {line}\n" for line in function.replace("(", "(self, ", 1).splitlines()
        )
        exec(function, names)
        outputs = [names[name](*arguments) for arguments in inputs]
        by_name = {"fn_name": name, "inputs": [list(arguments) for arguments in inputs], "outputs": outputs}
        written = [", ".join(map(repr, arguments)) for arguments in inputs]
        pairs = list(zip(written, outputs, strict=True))
        yield Case(f"{name} method", method, by_name)
        yield Case(f"{name} function", function, by_name)
        yield Case(f"{name} wrapped", method, {**by_name, "outputs": [[output] for output in outputs]})
        yield Case(
            f"{name} assert", method, [f"assert Solution().{name}({given}) == {output!r}" for given, output in pairs]
        )
        yield Case(
            f"{name} bare assert", function, [f"assert {name}({given}) == {output!r}" for given, output in pairs]
        )


_READING = {
    "input": "n = int(input())\nxs = list(map(int, input().split()))",
    "read": "import sys\nn, *xs = map(int, sys.stdin.read().split())",
    "buffer": "import sys\ndata = sys.stdin.buffer.read().split()\nn, xs = int(data[0]), list(map(int, data[1:]))",
    "lines": "import sys\nlines = sys.stdin.readlines()\nn, xs = int(lines[0]), [int(w) for w in lines[1].split()]",
    "readline": "import sys\ninput = sys.stdin.readline\nn = int(input())\nxs = [int(w) for w in input().split()]",
    "fileinput": "import fileinput\nrows = list(fileinput.input())\nn, xs = int(rows[0]), list(map(int, rows[1].split()))",
    "open": "rows = open(0).read().split('\\n')\nn, xs = int(rows[0]), list(map(int, rows[1].split()))",
}
_TASKS = {
    "sum": "sum(xs)",
    "max": "max(xs)",
    "sorted": "*sorted(xs)",
    "even": "sum(x % 2 == 0 for x in xs)",
    "gcd": "math.gcd(*xs)",
    "distinct": "len(set(xs))",
    "reverse": "' '.join(map(str, reversed(xs)))",
    "yes": "'YES' if sum(xs) % 2 else 'NO'",
    "prefix": "*itertools.accumulate(xs)",
    "big": "2 ** (sum(map(abs, xs)) * 3)",
}


def apps() -> Iterator[Case]:
    """Whole programs with standard input and output (APPS, TACO): ways of reading times tasks."""
    inputs = [[3, 1, 2], [10, -4, 7, 7], [5]]
    for (way, reading), (task, expression) in itertools.product(_READING.items(), _TASKS.items()):
        tests = []
        for xs in inputs:
            shown = eval(f"' '.join(map(str, [{expression}]))", {"xs": xs, "math": math, "itertools": itertools})
            tests.append((f"{len(xs)}\n{' '.join(map(str, xs))}\n", f"{shown}\n"))
        imports = "import math, itertools\n"
        column = {"inputs": [given for given, _ in tests], "outputs": [output for _, output in tests]}
        yield Case(f"{way} {task}", f"{imports}{reading}\nprint({expression})", column)


# ---------------------------------------------------------------- one by one

_SIX: Any = [{"input": "3\n", "output": "6\n"}]
_THREE = ["assert f(1) == 3"]
_HALF = ["assert abs(f(1) - 3.5) < 1e-06"]
_TEXT = ["assert f(1) == 'expected-string-7f3a'"]
_SET = ["assert set(f(1)) == {1, 2, 3}"]
_TWICE: Any = {"fn_name": "f", "inputs": [[1], [3]], "outputs": [[2], [6]]}
HACKS: dict[str, tuple[str, Any]] = {
    "exit at import": ("import sys\nsys.exit(0)", _SIX),
    "os._exit in call": ("import os\ndef f(x):\n    os._exit(0)", _THREE),
    "own values, extra": ("import os\ndef f(x):\n    os.write(3, b'value 3\\nvalue 3\\n')\n    return 3", _THREE),
    "nan for a difference": ("def f(x):\n    return float('nan')", _HALF),
    "nan for isclose": ("def f(x):\n    return float('nan')", ["assert math.isclose(f(1), 3.5, rel_tol=1e-09)"]),
    "inf": ("def f(x):\n    return float('inf')", _HALF),
    "-inf": ("def f(x):\n    return -float('inf')", _HALF),
    "number as text": ("def f(x):\n    return '3'", _THREE),
    "true for 3": ("def f(x):\n    return True", _THREE),
    "compatibility letters": ("def f(x):\n    return '\\uff45xpected-string-7f3a'", _TEXT),
    "homoglyph": ("def f(x):\n    return '\\u0435xpected-string-7f3a'", _TEXT),
    "superset": ("def f(x):\n    return [1, 2, 3, 4]", _SET),
    "text of a set": ("def f(x):\n    return ['{1, 2, 3}']", _SET),
    "dict like a tag": ("def f(x):\n    return {'set': [1, 2, 3]}", _SET),
    "dict like a tag of a tuple": ("def f(x):\n    return {'tuple': [1, 2, 3]}", ["assert f(1) == (1, 2, 3)"]),
    "calls of the job": ("import gc\ndef f(x):\n    return str([o for o in gc.get_objects() if isinstance(o, dict) and 'function' in o])", _TEXT),
    "search of the library": ("import sys\ndef f(x):\n    return next((v for m in list(sys.modules.values()) for v in list(vars(m).values()) if v == 'expected-string-' + '7f3a'), 'no')", _TEXT),
    "line continuation": ("def f(x):\n    return 1\n\\", _THREE),
    "solution twice": ("class Solution:\n    def f(self, x):\n        return 6\nclass Solution:\n    def f(self, x):\n        return 1", _TWICE),
    "class item": ("class Solution:\n    def __class_getitem__(cls, x):\n        return 6\n    def f(self, x):\n        return 2", _TWICE),
    "metaclass": ("class M(type):\n    def __call__(cls):\n        return cls\nclass Solution(metaclass=M):\n    f = staticmethod(lambda x: 2)", _TWICE),
    "generator": ("def f(x):\n    yield 3", _THREE),
    "long int": ("def f(x):\n    return 10 ** 4000", _THREE),
    "longer int": ("def f(x):\n    return 10 ** 50000", _THREE),
    "keys that become one": ("def f(x):\n    return {1: 2, '1': 3}", {"fn_name": "f", "inputs": [[1]], "outputs": [{"1": 3}]}),
    "text that lies": ("import json\nclass S(str):\n    def __eq__(self, other):\n        return True\n    __hash__ = str.__hash__\ndef f(x):\n    return S('no')", _TEXT),
    "patched plain data": ("import sys\nm = sys.modules['inside.plain_data']\nm.tagged = m.as_json = lambda *a: {'set': [1]}\ndef f(x):\n    return 0", _THREE),
    "patched equality": ("import sys\nm = sys.modules['inside.comparison']\nm.equal = m.close = m.within = lambda *a: True\ndef f(x):\n    return 0", ["assert Counter(f(1)) == Counter('abc')"]),
    "patched os.write": ("import os\nw = os.write\nos.write = lambda d, b: w(d, b.replace(b'2', b'1'))\ndef f(x):\n    return 2", _THREE),
    "atexit prints": ("import atexit\nprint(7)\natexit.register(print, 6)", _SIX),
    "signal handler": ("import os, signal\nsignal.signal(signal.SIGTERM, lambda *a: print(6))", _SIX),
    "exit with text": ("print(6)\nraise SystemExit('')", _SIX),
    "exit with true": ("print(6)\nraise SystemExit(True)", _SIX),
    "exit 256": ("print(6)\nraise SystemExit(256)", _SIX),
    "exit -256": ("print(7)\nraise SystemExit(-256)", _SIX),
    "exit huge": ("raise SystemExit(1 << 80)", _SIX),
    "bytes": ("def f(x):\n    return b'expected-string-7f3a'", _TEXT),
    "complex": ("def f(x):\n    return 3.5 + 1e-9j", ["assert f(1) == 3.5"]),
    "error of the sandbox": ("import os\nos.write(3, b'error OSError: mount: EPERM\\n')\nos._exit(1)", _SIX),
    "exit 113": ("print(6)\nraise SystemExit(113)", _SIX),
    "its own SIGXCPU": ("import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)", _SIX),
    "its own SIGSYS": ("import os, signal\nos.kill(os.getpid(), signal.SIGSYS)", _SIX),
    "closed report": ("import os\nos.close(3)\ndef f(x):\n    return 3", _THREE),
    "output as report": ("import os\ndef f(x):\n    os.dup2(1, 3)\n    return 3", _THREE),
    "prelude for the function": ("x = 1", ["assert gcd(4, 6) == 2"]),
    "imported builtins": ("from builtins import *", {"asserts": ["assert sum([1, 2]) == 4"], "fn_name": "sum"}),
    "import of its name": ("def g(x):\n    return 3", _THREE),
    "item that equals": ("class A(dict):\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef f(x):\n    return A(a=1)", ["assert f(1) == {'a': 2}"]),
    "ordered otherwise": ("from collections import OrderedDict\ndef f(x):\n    return OrderedDict(b=1, a=2)", ["assert f(1) == OrderedDict([('a', 2), ('b', 1)])"]),
    "list for a deque": ("def f(x):\n    return [1, 2, 3]", ["assert f(1) == deque([1, 2, 3])"]),
    "unfinished iterator": ("def f(x):\n    return iter([1, 2])", ["assert f(1) == [1, 2]"]),
    "text with a fence": ("x = '''\n```\nprint(6)\n'''", _SIX),
}  # fmt: skip


def hacks() -> Iterator[Case]:
    return (Case(name, program, tests) for name, (program, tests) in HACKS.items())
