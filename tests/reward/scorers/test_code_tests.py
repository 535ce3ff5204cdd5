"""The code scorer outside the sandbox: finding programs, reading tests, comparing plain data."""

import builtins
import contextlib
import json
import math
import time as time_module
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import pytest

from penstock.services.reward.executor.inside import comparison, plain_data
from penstock.services.reward.scorers.code import asserts, program_results
from penstock.services.reward.scorers.code.clean_interpreter import Unsupported
from penstock.services.reward.scorers.code.program import NoProgram, last_block, program_of
from penstock.services.reward.scorers.code.suite import BadTests, read_tests
from penstock.services.reward.scorers.code.tests import AssertTest, CallTest, ProgramTest
from penstock.shared.executor.protocol import Call, Execution, Limits, Outcome

F = "```"
SQUARE = "def f(x):\n    return x * x\n"
DOCTEST = f'def f(x):\n    """Square.\n\n    {F}\n    >>> f(2)\n    {F}\n    """\n    return x * x\n'


class _Text(str):
    """A program's output in place of JSON."""


def finished(*values: Any, stdout: str = "") -> Execution:
    texts = tuple(value if isinstance(value, _Text) else json.dumps(value) for value in values)
    return Execution(Outcome.FINISHED, stdout, texts, "", 0, 0.01, 0.01, 0, "namespace")


def problem(source: str, *values: Any) -> str:
    """Return what is wrong; what is left to a clean interpreter is compared here."""
    (split,) = asserts.split([source])
    given = tuple(json.dumps(plain_data.tagged(eval(text), "given")) for text in split.given)
    left = AssertTest(split, given).problem(finished(*values), 0.0)
    if isinstance(left, str):
        return left
    with patch.object(builtins, "math", math, create=True):  # as the prelude does
        arguments: Any = left.arguments
        return comparison.holds(*arguments)


def holds(source: str, *values: Any) -> bool:
    return problem(source, *values) == ""


# ---------------------------------------------------------------- the program of a completion


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (f"So:\n{F}python\nprint(1)\n{F}\nDone.", "print(1)\n"),
        (f"{F}py\nold\n{F}\n{F}python3 title=x\nnew\n{F}", "new\n"),
        (f"{F}\nprint(1)\n{F}\n{F}bash\nls\n{F}", "print(1)\n"),
        (f"{F}bash\n{F}python\nprint(1)\n{F}\n{F}Python\nprint(2)\n{F}", "print(2)\n"),
        (f"~~~python\nprint('{F}')\n~~~", f"print('{F}')\n"),
        (f"{F}{F}\nprint(1)\n{F}\n{F}{F}\n", f"print(1)\n{F}\n"),
        (f"1. So:\n   {F}python\n   if x:\n       y\n  z\n   {F}\n", "if x:\n    y\nz\n"),
        (f"{F}python\r\nprint(1)\r\n{F}\r\n", "print(1)\n"),
        (f"{F}python\n{SQUARE}{F}\nExample output:\n{F}\n4\n{F}", SQUARE),
        (f"{F}python\n{SQUARE}{F}\n{F}\nprint(f(2))\n{F}", SQUARE),
        (f"{F}python\n{SQUARE}{F}\nFor example:\n{F}python\nprint(f(2))  # 4\n{F}", SQUARE),
        (f"{F}python\n{SQUARE}{F}\n{F}python\n>>> f(2)\n4\n{F}", SQUARE),
        (f"{F}python\n{SQUARE}{F}\n{F}python\n[4, 'x', None]\n{F}", SQUARE),
        (f"{F}\n{SQUARE}{F}\nThe output is:\n{F}\nHello (world)\n{F}", SQUARE),
        (f"{F}python\n{SQUARE}{F}\nSample input:\n{F}\n2 3\n", SQUARE),
        (f"{F}python\n{SQUARE}{F}\n{F}python\nfrom m import f\nprint(f(2))\n{F}", "from m import f\nprint(f(2))\n"),
        (f"{F}python\n{SQUARE}{F}\n{F}python\nprint('f')  # f\n{F}", "print('f')  # f\n"),
        (f"{F}python\n{DOCTEST}{F}\n", DOCTEST),
        (f"{F}python\nx = 1\n    {F}\nprint(x)\n   {F}\n", f"x = 1\n    {F}\nprint(x)\n"),
    ],
    ids=[
        *("one", "last", "others", "unclosed-other", "tilde", "longer", "indented", "crlf"),
        *("output", "unlabelled-example", "example", "prompt", "literals", "unlabelled-output", "unclosed-input"),
        *("imported", "not-used", "doctest", "inner-fence"),
    ],
)
def test_the_last_fenced_block_that_is_a_program_in_python_is_the_program(text: str, program: str) -> None:
    assert program_of(text) == program


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("print(1)", "expected a fenced block of Python, found none"),
        (f"{F}rust\nfn main() {{}}\n{F}", "expected a fenced block of Python, found 1 in other languages"),
        (f"{F}python\nprint(1)\n{F}\n{F}python\nprint(2)", "expected the last fenced block to be closed"),
        (f"the code is {F}print(1){F}", "expected a fenced block of Python, found none"),
    ],
)
def test_a_completion_without_a_whole_block_holds_no_program(text: str, sentence: str) -> None:
    with pytest.raises(NoProgram, match=sentence):
        program_of(text)


@pytest.mark.parametrize(
    "text",
    [
        f"{F}python\n{F}",
        f"{F}\n4\n{F}",
        f"{F}python\n{SQUARE}{F}\nBetter:\n{F}\ndef f(x):",
        f"{F}python\n{SQUARE}{F}\nBetter:\n{F}python\n",
    ],
)
def test_outputs_and_unfinished_programs_are_none(text: str) -> None:
    with pytest.raises(NoProgram):
        program_of(text)


def test_the_last_block_that_defines_the_function_under_test_is_the_program() -> None:
    other = "def main():\n    print(f(2))\nmain()\n"
    text = f"{F}python\n{SQUARE}{F}\n{F}python\n{other}{F}"
    assert program_of(text, function="f") == SQUARE
    assert program_of(text) == program_of(text, function="g") == other
    method = "class Solution:\n    def f(self, x):\n        return x\n"
    assert program_of(f"{F}python\n{method}{F}\n{F}python\n{other}{F}", function="f") == method
    named = "f = lambda x: x * x\n"
    assert program_of(f"{F}python\n{SQUARE}{F}\n{F}python\n{named}{F}\n{F}python\n{other}{F}", function="f") == named


def test_a_labelled_example_hides_no_program_without_a_label() -> None:
    program, example = SQUARE, f"{F}python\nprint(f(3))\n{F}"
    text = f"{F}\n{program}{F}\n{example}"
    assert program_of(text) == program_of(text, function="f") == program
    assert program_of(f"{example}\n{F}\n{program}{F}", function="f") == program
    assert program_of(f"{F}\n{program}{F}\n{F}python\nprint(2)\n{F}") == "print(2)\n"
    bound = f"{F}python\nf = None\n{F}"
    assert program_of(f"{F}python\n{program}{F}\n{bound}", function="f") == program
    assert program_of(f"{F}\n{program}{F}\n{bound}", function="f") == program


@pytest.mark.parametrize(
    "part",
    ["'" * 3, '"', "def f(", "x" + " " * 50, "[", "'\\", f"\n{F}\nf(1)\n{F}\n", "a=", "#'", ">>> ", "f" + "'" * 3],
)
def test_a_hostile_text_is_searched_in_linear_time(part: str) -> None:
    def seconds(count: int) -> float:
        started_s = time_module.process_time()
        with contextlib.suppress(NoProgram):
            program_of(f"{F}python\n{SQUARE}{F}\n{F}python\n{part * count}\n{F}", function="g")
        return time_module.process_time() - started_s

    assert seconds(20_000) < 60 * seconds(2_000) + 0.5, "ten times the text, not a hundred times the work"


def test_livecodebench_reads_what_is_between_the_last_two_fences() -> None:
    assert last_block(f"{F}python\nold\n{F}\n{F}\n4\n{F} {F}") == "4"
    with pytest.raises(NoProgram, match="LiveCodeBench"):
        last_block(f"print(1)\n{F}")


def test_where_no_block_is_needed_the_whole_text_is_the_program_unless_there_is_one() -> None:
    assert program_of("print(1)", needs_block=False) == "print(1)"
    assert program_of(f"{F}\nprint(2)\n{F}", needs_block=False) == "print(2)\n"


# ---------------------------------------------------------------- the tests of a problem


def test_tests_come_in_the_shapes_that_datasets_have() -> None:
    assert read_tests([{"input": "2 3\n", "output": "5\n"}]) == (ProgramTest("2 3\n", "5\n"),)
    assert read_tests([{"fn_name": "f", "input": [2, 3], "output": 5}]) == (CallTest("f", (2, 3), 5),)
    assert read_tests({"inputs": [["2", "3"]], "outputs": ["5"]}) == (ProgramTest("2\n3\n", "5"),)
    assert read_tests({"fn_name": "f", "inputs": [[2]], "outputs": [[4]]}) == (CallTest("f", (2,), [4], wrapped=True),)
    assert read_tests('{"inputs": ["1"], "outputs": ["2"]}') == (ProgramTest("1", "2"),)
    assert read_tests({"asserts": ["assert sum(1) == 2"], "fn_name": "sum"})[0].job("", "stdlib", Limits()).calls == (
        Call("sum", expression="sum(1)"),
    )
    (first, second) = read_tests("assert f(1) == 2\nassert f(2) == 3, 'no'")
    assert isinstance(first, AssertTest)
    assert isinstance(second, AssertTest)
    assert (first.split.calls, second.split.calls) == (("f(1)",), ("f(2)",))
    assert second.split.source == "assert f(2) == 3"


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        (3, "expected tests as .* found 3"),
        ([], "expected at least one test, found none"),
        ({"inputs": ["1"], "outputs": []}, r'expected as many inputs as outputs, found \["1"\] and \[\]'),
        ([{"input": "1"}], "expected a test as {input, output} or an assert"),
        (
            [{"input": [1, 2], "output": 3}],
            "expected a program's input as text, found 1; a function's test has fn_name",
        ),
        ([{"fn_name": "f", "input": 1, "output": 3}], "expected a list of arguments for f, found 1"),
        ([{"fn_name": "os.system('x')", "input": [], "output": 3}], "expected a function's name as fn_name"),
        (["x = f(1)"], "this row has 'x = f.1.', which is no assert"),
        (["assert f(1"], "this row has text that is no Python"),
        ([""], "this row has no assert"),
        (["assert 1 + 1 == 2"], "which calls no function of the program"),
        (["assert sorted([2, 1]) == [1, 2]"], "which calls no function of the program"),
        (["assert check(f(1), 5)"], "which is given a result beside data that may be the expected value"),
        (["assert check([f(1), 5])"], "which is given a result beside data"),
        (["assert f(1).__eq__(5)"], "the attribute '__eq__'"),
        (["assert f(1).value == 2"], "the attribute 'value' of a result, which is plain data"),
        (["assert sorted(f(1), key=g) == [2]"], "the name 'g', which the row does not define"),
        (["assert isinstance(f(1), Exception)"], "isinstance.. but with types of Decimal"),
        (["assert f(root) == 3"], "the name 'root', which the row does not define"),
        (["assert all(f(x) == x for x in [1, 2])"], "the name 'x', which the row does not define"),
        (["assert f(5) == g(5)"], "any of f, g may be the function under test: name it as fn_name"),
        (["assert f(5) == 1", "assert g(5) == 1"], "any of f, g may be the function under test"),
        (["assert f(5) == 1", "assert f(6) == g(6)"], "the name 'g', which the row does not define"),
        (["assert f(2) == Point(1, 2)"], "the name 'Point', which the row does not define"),
        (["assert sum(10, 15) == 6"], "which calls no function of the program"),
        (["assert math.sqrt(9) == 3"], "which calls no function of the program"),
        (["assert Counter('a') == {'a': 1}"], "which calls no function of the program"),
        (["assert module.f(1) == 3"], "which calls no function of the program"),
        (["assert type(f(1)) == int"], "the name 'type'"),
        (["assert repr(f(1)) == '2'"], "the name 'repr'"),
        (["assert hash(f(1)) == hash((1, 2))"], "the name 'hash'"),
        (["assert callable(f(1))"], "the name 'callable'"),
        (["assert f(1) == datetime.datetime.now()"], "the attribute 'now'"),
        (["assert f(1) == random.random()"], "random"),
        ({"asserts": ["assert f(1) == 2"], "fn_name": "g"}, "no call of the function under test, g"),
        ({"asserts": 3}, "expected asserts as text, found 3"),
    ],
)
def test_tests_that_cannot_be_used_are_refused_with_a_sentence_and_never_passed(column: Any, sentence: str) -> None:
    with pytest.raises(BadTests, match=sentence):
        read_tests(column)


@pytest.mark.parametrize(
    "column",
    [
        [{"input": "2 3\n", "output": "SECRET"}],
        [{"fn_name": "f", "input": [2, 3], "output": "SECRET"}],
        {"fn_name": "f", "inputs": [[2]], "outputs": ["SECRET"]},
        ["assert f(2, [3]) == 'SECRET'"],
        ["assert f(2) in ['SECRET'] and f(h(3)) != 'SECRET'"],
        ["assert math.isclose(f(2), len('SECRET')), 'SECRET'"],
        ["assert f(2) == Decimal('SECRET')"],
        ["assert Counter(f(2)) == Counter('SECRET')"],
        ["assert f(2).startswith('SECRET')"],
        ["assert [x for x in f(2)] == sorted('SECRET')"],
        ["assert np.allclose(f(2), np.array(['SECRET']))"],
        ["assert f(2) == textwrap.dedent('SECRET')"],
    ],
)
def test_no_expected_output_is_in_what_is_sent_inside(column: Any) -> None:
    for test in read_tests(column):
        assert "SECRET" not in repr(test.job("def f(): pass", "stdlib", Limits()))


def test_the_check_of_humaneval_is_its_asserts_about_the_rows_function() -> None:
    check = "META = {}\ndef check(candidate):\n    assert True\n    assert candidate(2) == 4\n"
    (test,) = read_tests(check, "f")
    assert isinstance(test, AssertTest)
    assert (test.function, test.split.calls) == ("f", ("f(2)",))
    for wrong in (check + "def g(): pass", "def check(): assert f(2) == 4", check + "    for x in range(3): pass\n"):
        with pytest.raises(BadTests):
            read_tests(wrong, "f")
    assert isinstance(read_tests('[{"input": "def check(x)", "output": "1"}]', "f")[0], ProgramTest)


def test_a_method_of_solution_is_called_where_the_program_has_that_class() -> None:
    test = CallTest("f", (1,), 2)
    assert test.job("class Solution:\n    def f(self, x): ...", "stdlib", Limits()).calls[0].function == "Solution.f"
    assert test.job("def f(x): ...  # no class Solution", "stdlib", Limits()).calls[0].function == "f"


# ---------------------------------------------------------------- equality


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (None, False), ("1", 1), ([1], (1,)), (2, True), (1, 1.5), ([1], [1, 2]), ({"a": 1}, {"a": 1, "b": 2}), ((1, 2), (2, 1)),
        (math.nan, math.nan), (10**400, math.inf), (b"a", "a"),
    ],
)  # fmt: skip
def test_what_python_calls_different_is_not_equal_with_a_tolerance_or_without(value: Any, other: Any) -> None:
    for tolerance in (0.0, 1e-6):
        assert not comparison.equal(value, other, tolerance)
        assert not comparison.equal(other, value, tolerance)


@pytest.mark.parametrize(
    ("value", "other"), [(2.0, 2), (True, 1), (0, -0.0), ({1}, {True}), ([1, (2,)], [1.0, (2.0,)]), ({1: 2}, {1.0: 2}), (10**50, 10**50)]
)  # fmt: skip
def test_what_python_calls_equal_is_equal(value: Any, other: Any) -> None:
    assert comparison.equal(value, other, 0.0)
    assert comparison.equal(value, other, 1e-6)


def test_with_a_tolerance_numbers_are_equal_that_are_close_and_infinity_is_close_to_itself_alone() -> None:
    assert comparison.equal([1, {"a": 0.0}], [1.0000001, {"a": 1e-7}], 1e-6)
    assert comparison.equal(Fraction(1, 3), 0.3333333, 1e-6)
    assert comparison.equal(Decimal("0.1"), 0.1, 1e-6)
    assert comparison.equal(10**400, 10**400 + 1, 1e-6)
    assert comparison.equal(math.inf, math.inf, 1e-6)
    assert not comparison.equal(1, 1.01, 1e-3)
    assert not comparison.equal(10**400, math.inf, 1e-3)
    assert not comparison.equal(10**400, 1e308, 1e-3)


@pytest.mark.parametrize("tolerance", [1e-9, 1e-3, 1.0, 1e9])
@pytest.mark.parametrize("word", ["1e400", "inf", "-inf", "Infinity", "1e999999", "nan", "9" * 5000, "１", "1_0"])
def test_no_tolerance_makes_a_word_that_is_no_finite_number_an_integer(word: str, tolerance: float) -> None:
    for expected in ("1" + "0" * 400, "1", "10", "-7"):
        assert not program_results.same_text(expected, word, tolerance)


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("1 2\n3", "1 2  \r\n3\t\n\n", True),
        ("", "\n \n", True),
        ("1 2", "1  2", False),
        ("1\n\n2", "1\n2", False),
        (" 1", "1", False),
        ("1.0", "1", True),
        ("0.5 -3 1e2", "0.50 -3.0 100", True),
        ("0.5", "0.51", False),
        ("007", "7", False),
        ("0101 0.5", "101 0.5", False),
        ("x 0.5", "x 0.50", False),
        ("0.5", "nan", False),
        ("1e999999999", "1", False),
        ("0.5", "1e99999999999999999999", False),
        ("0.5 1", "0.5 -1e-99999999999999999999", False),
        ("1" * 5000 + ".0", "1" * 5000, False),
        ("a\x0bb", "a\nb", False),
    ],
)
def test_outputs_are_the_same_but_for_white_space_at_the_ends(expected: str, printed: str, same: bool) -> None:
    assert program_results.same_text(expected, printed) is same


@pytest.mark.parametrize("same", [program_results.same_text, program_results.same_text_as_livecodebench])
@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
@pytest.mark.parametrize(
    "printed", ["1e99999999999999999999", "sNaN", "nan", "-inf", "1" * 5000, "+-1", "\ud800", "1e+", "\x00"]
)
def test_no_output_ends_a_comparison(same: Callable[[str, str, float], bool], tolerance: float, printed: str) -> None:
    assert not same("0.5", printed, tolerance)


def test_with_a_tolerance_numbers_in_outputs_are_compared_as_numbers() -> None:
    assert program_results.same_text("x 1.0\n2", "x 1\n2.0000001\n", 1e-6)
    assert not program_results.same_text("x 1.0", "y 1.0", 1e-6)
    assert not program_results.same_text("1 2", "1", 1e-6)


# ---------------------------------------------------------------- asserts


@pytest.mark.parametrize(
    ("source", "values"),
    [
        ("assert f(1) == 5", (5,)),
        ("assert f((1, 2)) == (2, 1)", ({"tuple": [2, 1]},)),
        ("assert f() == {1, 2}", ({"set": [2, 1]},)),
        ("assert f() == {1: 'a'}", ({"dict": [[1, "a"]]},)),
        ("assert f() == [{'a': (1,)}]", ([{"dict": [["a", {"tuple": [1]}]]}],)),
        ("assert not f(1)", (False,)),
        ("assert f(1) is None", (None,)),
        ("assert f(1) and f(2) or f(3)", (0, 1, 2)),
        ("assert f(1) == 1", (True,)),
        ("assert f(1) == 2", (2.0,)),
        ("assert math.isnan(f(1)) and not math.isinf(f(1))", (math.nan, math.nan)),
        ("assert 1 < f(1) <= 3 != f(2)", (2, 4)),
        ("assert sorted(f(1)) == [1, 2]", ([2, 1],)),
        ("assert set(f(1)) == set([1, 2])", ([2, 1, 1],)),
        ("assert f(1) == {frozenset({1})}", ({"set": [{"frozenset": [1]}]},)),
        ("assert abs(f(1) - 0.5) < 1e-6", (0.50000001,)),
        ("assert math.isclose(f(1), 0.5, rel_tol=0.01)", (0.501,)),
        ("assert round(f(1), 2) == 0.33", (1 / 3,)),
        ("assert len(f(1)) == 2 and f(1)[0] == -3 and f(1)[1:] == [4]", ([-3, 4], [-3, 4], [-3, 4])),
        ("assert isinstance(f(1), (int, str))", ("x",)),
        ("assert 'b' in f(1) and 9 not in f(2)", ("abc", [1, 2])),
        ("assert f(1) == 2 ** 10 // 3 % 7 * 1.0", (5.0,)),
        ("assert Solution().f(Node(1), 2) == 5", (5,)),
    ],
)
def test_an_assert_holds_for_what_its_calls_should_return(source: str, values: tuple[Any, ...]) -> None:
    assert holds(source, *values)


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("assert f(1) == 5", 5.5),
        ("assert f(1) == (2, 1)", [2, 1]),
        ("assert f(1) == [2, 1]", {"tuple": [2, 1]}),
        ("assert isinstance(f(1), str)", 1),
        ("assert f(1) is True", 1),
        ("assert f(1) in [1, 2]", 3),
        ("assert len(f(1)) == 2", 2),
        ("assert f(1)[3] == 2", [1]),
        ("assert 1 / f(1) == 2", 0),
        ("assert math.isnan(f(1))", math.inf),
        ("assert f(1) == 5", {"tuple": 3}),
        ("assert f(1) == 5", {"tuple": [], "set": []}),
        ("assert f(1) == 5", {"set": [[1]]}),
        ("assert f(1) == 5", {"dict": [1]}),
        ("assert f(1) == 5", {"int": 5}),
        ("assert f(1) == 5", {}),
        ("assert f(1) == 5", _Text("")),
        ("assert f(1) == 5", _Text("[")),
        ("assert f(1) == 5", _Text("[" * 10_000)),
    ],
)
def test_an_assert_does_not_hold_for_what_is_merely_like_it_nor_for_forged_text(source: str, value: Any) -> None:
    assert problem(source, *[value] * source.count("f(1)")) != ""


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("assert f(1) == 5", {"Decimal": "5"}),
        ("assert f(1) == 5", {"object": 5}),
        ("assert set(f(1)) == {1}", list(range(8000))),
        ("assert f(1) ** f(1) == 2", 10**9),
        ("assert f(1) is None", None),
        ("assert Counter(f(1)) == {1: 2}", [1, 1]),
        ("assert [x for x in f(1)] == [2]", [2]),
        ("assert f(1).lower() == 'a'", "A"),
        ("assert f(1) == 5", _Text("9" * 5_000)),
    ],
)
def test_what_is_large_or_not_simple_is_left_to_a_clean_interpreter(source: str, value: Any) -> None:
    (split,) = asserts.split([source])
    left = AssertTest(split).problem(finished(*[value] * len(split.calls)), 0.0)
    assert isinstance(left, Call)
    assert left.function == "holds"


def test_a_set_of_integers_whose_hashes_all_collide_is_not_built_here_where_it_is_long() -> None:
    colliding = {"set": [place * ((1 << 61) - 1) for place in range(40_000)]}
    (split,) = asserts.split(["assert f(1) == {1, 2}"])
    assert isinstance(AssertTest(split).problem(finished(colliding), 0.0), Call)
    short = {"set": colliding["set"][:700]}
    assert len(json.dumps(short)) < program_results.LONGEST
    assert str(AssertTest(split).problem(finished(short), 0.0)).startswith("call_0 == {1, 2} does not hold")


def test_data_of_a_thousand_levels_is_wrong_and_breaks_nothing() -> None:
    deep = _Text("[" * 5_000 + "]" * 5_000)
    assert not holds("assert f(1) == [[]]", deep)
    assert CallTest("f", (), [[]]).problem(finished(deep), 0.0) != ""
    for tag in ("tuple", "set", "dict", "Counter", "iterator"):
        nested = _Text(f'{{"{tag}": [' * 900 + "]}" * 900)
        assert not holds("assert f(1) == [[]]", nested)
        assert comparison.holds("call_0 == 1", {"call_0": nested}, 0.0).startswith("call_0 == 1 ended in ")


# ---------------------------------------------------------------- results as data


class _Level(IntEnum):
    HIGH = 3


class _Words(list[Any]):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None


_Point = namedtuple("_Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        None, True, 7, 1.5, -0.0, math.inf, "é", [1, [2.0, None]], (1, (2,)), {1, "a", (2, 3)}, frozenset({1}),
        {frozenset({1}), frozenset()}, {"a": [1], 2: {3: 4}, None: 5, (1, 2): 6}, Counter("aab"), OrderedDict(b=1, a=2), deque([1, 2]),
        range(1, 9, 3), Decimal("1.50"), Fraction(1, 3), b"\x00\xff", bytearray(b"x"), 1 + 2j, datetime(2020, 1, 2, 3, 4, 5, 6),
        date(2020, 1, 2), time(1, 2, 3), timedelta(-1, 2, 3), {}, [], (), set(), {"tuple": [1]}, [{"set": [1]}],
    ],
)  # fmt: skip
def test_data_comes_out_as_it_went_in(value: Any) -> None:
    again = plain_data.rebuilt(json.loads(json.dumps(plain_data.tagged(value, "f"))))
    assert (type(again), again) == (type(value), value)


@pytest.mark.parametrize(
    ("value", "comes_out"),
    [
        (_Level.HIGH, 3), (_Words([1]), [1]), (_Point(1, 2), (1, 2)), (defaultdict(int, a=1), {"a": 1}), ({1: 2}.keys(), {1: 2}.keys()),
        (True, True),
    ],
)  # fmt: skip
def test_a_subclass_comes_out_as_what_it_is_a_subclass_of(value: Any, comes_out: Any) -> None:
    again = plain_data.rebuilt(json.loads(json.dumps(plain_data.tagged(value, "f"))))
    assert (type(again), again) == (type(comes_out), comes_out)


@pytest.mark.parametrize(
    "value",
    [map(str, [1, 2]), (str(n) for n in (1, 2)), iter(["1", "2"]), {"1": 0, "2": 0}.keys(), {1: "1", 2: "2"}.values()],
)
def test_what_is_iterated_over_comes_out_with_its_items(value: Any) -> None:
    text = json.dumps(plain_data.tagged(value, "f"))
    assert comparison.holds("list(call_0) == ['1', '2']", {"call_0": text}, 0.0) == ""
    assert comparison.holds("call_0 == ['1', '2']", {"call_0": text}, 0.0) != ""


def test_an_integer_comes_out_whatever_its_size() -> None:
    for value in (10**5000, -(10**5000), 1 << 10_000, (1 << 10_000) - 1):
        assert plain_data.rebuilt(json.loads(json.dumps(plain_data.tagged(value, "f")))) == value


def test_what_is_no_data_or_has_no_end_does_not_come_out() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value, why in (
        (object(), "object"),
        (len, "builtin_function"),
        (loop, "levels"),
        (iter(int, 1), "iterator of more than 100000"),
    ):
        with pytest.raises(plain_data.NotPlain, match=why):
            plain_data.tagged(value, "f")
    for value in ({1, 2}, b"x", 1j, {(1, 2): 3}, {1: 2, "1": 3}):
        with pytest.raises(plain_data.NotPlain):
            plain_data.as_json(value, "f")


def test_of_a_call_every_sequence_comes_out_as_a_list() -> None:
    assert plain_data.as_json([(1,), deque([2]), range(2), map(str, [3]), Counter("a"), {1: _Level.HIGH}], "f") == [
        [1], [2], [0, 1], ["3"], {"a": 1}, {"1": 3},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "value", "tolerance", "right"),
    [
        ("call_0 == Decimal('1.50')", {"Decimal": "1.5"}, 0.0, True),
        ("call_0 == Decimal('1.50')", {"Decimal": "sNaN"}, 0.0, False),
        ("call_0 == {'a': 2}", {"Counter": [["a", 2]]}, 0.0, True),
        ("call_0 == OrderedDict(a=1, b=2)", {"OrderedDict": [["b", 2], ["a", 1]]}, 0.0, False),
        ("call_0 == [0.3, 1]", {"iterator": [0.3, 1]}, 0.0, False),
        ("0 < call_0 == 0.3 != 1", 0.30000001, 1e-6, True),
        ("call_0 not in [0.3, 1]", 0.30000001, 1e-6, False),
        ("call_0 == [0.3]", [0.30000001], 0.0, False),
        ("call_0 == 1", {"__class__": 1}, 0.0, False),
    ],
)
def test_a_clean_interpreter_compares_as_python_does(
    monkeypatch: pytest.MonkeyPatch, check: str, value: Any, tolerance: float, right: bool
) -> None:
    monkeypatch.setattr(builtins, "Decimal", Decimal, raising=False)  # as the prelude does
    monkeypatch.setattr(builtins, "OrderedDict", OrderedDict, raising=False)
    texts = {"call_0": json.dumps(value)}
    assert (comparison.holds(check, texts, tolerance) == "") is right


def test_a_check_knows_no_other_names_than_those_of_calls() -> None:
    with pytest.raises(Unsupported, match="open"):
        asserts.split(["assert f(1) == open"])


@pytest.mark.parametrize(("expected", "returned"), [([3], 3), ([3], [3]), (3, 3), ([[3]], [3])])
def test_an_expected_list_of_one_stands_for_its_element_in_the_shape_of_apps(expected: Any, returned: Any) -> None:
    assert CallTest("f", (), expected, wrapped=True).problem(finished(returned), 0.0) == ""
    assert CallTest("f", (), [1, 2], wrapped=True).problem(finished(1), 0.0) == "expected [1, 2], found 1"
