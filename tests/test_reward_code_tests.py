"""Laws of what the code scorer does outside the sandbox: finding programs, reading tests, comparing plain data."""

import ast
import math
from typing import Any

import pytest

from services.reward.code import asserts, plain
from services.reward.code.evaluation import Evaluator, Refused
from services.reward.code.program import NoProgram, program_of
from services.reward.code.suite import BadTests, read_tests
from services.reward.code.tests import AssertTest, CallTest, ProgramTest
from services.reward.executor.protocol import Execution, Limits, Outcome

F = "```"


def finished(*values: Any, stdout: str = "") -> Execution:
    return Execution(Outcome.FINISHED, stdout, values, "", 0, 0.01, 0.01, 0, "namespace")


def holds(source: str, *values: Any, tolerance: float = 0.0) -> bool:
    (split,) = asserts.split(source)
    return AssertTest(split).problem(finished(*values), tolerance) == ""


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
        (f"{F}python\n{F}", ""),
    ],
    ids=["one", "last", "others", "unclosed-other", "tilde", "longer", "indented", "crlf", "empty"],
)
def test_the_last_fenced_block_in_python_is_the_program(text: str, program: str) -> None:
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
        (["x = f(1)"], "found 'x = f.1.', which is no assert"),
        (["assert f(1"], "found text that is no Python"),
        ([""], "found no assert"),
        (["assert 1 + 1 == 2"], "which calls no function of the program"),
        (["assert sorted([2, 1]) == [1, 2]"], "which calls no function of the program"),
        (["assert check(f(1), 5)"], "which is given a result beside data that may be the expected value"),
        (["assert check([f(1), 5])"], "which is given a result beside data"),
        (["assert f(1).__eq__(5)"], "a method of a result"),
        (["assert [x for x in f(1)] == [2]"], "'ListComp'|ListComp"),
        (["assert f(1) is f(2)"], "'is' but with None, True or False"),
        (["assert f(1).value == 2"], "Attribute"),
        (["assert sorted(f(1), key=g) == [2]"], "the argument 'key' of sorted"),
        (["assert isinstance(f(1), Exception)"], "isinstance.. but with types of bool"),
        (["assert f(1) @ 2 == 3"], "BinOp"),
        (["assert f(1) == b'2'"], "Constant"),
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
        ["assert f(2) in ['SECRET'] and g(h(3)) != 'SECRET'"],
        ["assert math.isclose(f(2), len('SECRET')), 'SECRET'"],
    ],
)
def test_no_expected_output_is_in_what_is_sent_inside(column: Any) -> None:
    for test in read_tests(column):
        assert "SECRET" not in repr(test.job("def f(): pass", "stdlib", Limits()))


def test_a_method_of_solution_is_called_where_the_program_has_that_class() -> None:
    test = CallTest("f", (1,), 2)
    assert test.job("class Solution:\n    def f(self, x): ...", "stdlib", Limits()).calls[0].function == "Solution.f"
    assert test.job("def f(x): ...  # no class Solution", "stdlib", Limits()).calls[0].function == "f"


# ---------------------------------------------------------------- equality


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (True, 1), (1, 1.0), (0, False), (None, False), ("1", 1), ([1], (1,)), ([1, [True]], [1, [1]]), ({1}, {True}),
        ({1: 2}, {True: 2}), ({1: 2}, {1: 2.0}), ([1], [1, 2]), ({"a": 1}, {"a": 1, "b": 2}), ((1, 2), (2, 1)),
        ({(1, 2)}, {(1, True)}), (math.nan, math.nan),
    ],
)  # fmt: skip
def test_what_is_of_another_type_is_not_equal(one: Any, other: Any) -> None:
    assert not plain.equal(one, other)
    assert not plain.equal(other, one)


@pytest.mark.parametrize(
    "value", [None, True, 7, 10**50, 1.5, "x", [1, [2.0, None]], (1, (2,)), {1, "a", (2, 3)}, {"a": [1], 2: {3: 4}}]
)
def test_what_is_the_same_is_equal(value: Any) -> None:
    assert plain.equal(value, ast.literal_eval(repr(value)))


def test_with_a_tolerance_numbers_are_of_one_kind_and_bools_are_none() -> None:
    assert plain.equal([1, 0.0], [1.0000001, 1e-7], 1e-6)
    assert not plain.equal(1, 1.01, 1e-3)
    assert not plain.equal(True, 1.0, 1e-3)
    assert not plain.equal(10**400, 1.0, 1e-3)
    assert not plain.equal(math.nan, math.nan, 1e-3)


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ("1 2\n3", "1 2  \r\n3\t\n\n", True),
        ("", "\n \n", True),
        ("1 2", "1  2", False),
        ("1\n\n2", "1\n2", False),
        (" 1", "1", False),
        ("1.0", "1", False),
        ("a\x0bb", "a\nb", False),
    ],
)
def test_outputs_are_the_same_but_for_white_space_at_the_ends(expected: str, found: str, same: bool) -> None:
    assert plain.same_text(expected, found) is same


def test_with_a_tolerance_numbers_in_outputs_are_compared_as_numbers() -> None:
    assert plain.same_text("x 1.0\n2", "x 1\n2.0000001\n", 1e-6)
    assert not plain.same_text("x 1.0", "y 1.0", 1e-6)
    assert not plain.same_text("1 2", "1", 1e-6)


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
        ("assert 1 < f(1) <= 3 != f(2)", (2, 4)),
        ("assert sorted(f(1)) == [1, 2]", ([2, 1],)),
        ("assert set(f(1)) == set([1, 2])", ([2, 1, 1],)),
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
        ("assert f(1) == True", 1),
        ("assert f(1) == 5", 5.0),
        ("assert f(1) == (2, 1)", [2, 1]),
        ("assert f(1) == [2, 1]", {"tuple": [2, 1]}),
        ("assert isinstance(f(1), int)", True),
        ("assert f(1) is True", 1),
        ("assert f(1) in [1, 2]", True),
        ("assert len(f(1)) == 2", 2),
        ("assert f(1)[3] == 2", [1]),
        ("assert 1 / f(1) == 2", 0),
        ("assert f(1) ** f(1) == 2", 10**9),
        ("assert f(1) * 'x' == 'x'", 10**9),
        ("assert round(f(1), -3000) == 0", 5),
        ("assert f(1) == 5", {"tuple": 3}),
        ("assert f(1) == 5", {"tuple": [], "set": []}),
        ("assert f(1) == 5", {"set": [[1]]}),
        ("assert f(1) == 5", {"dict": [1]}),
    ],
)
def test_an_assert_does_not_hold_for_what_is_merely_like_it(source: str, value: Any) -> None:
    (split,) = asserts.split(source)
    assert AssertTest(split).problem(finished(*[value] * len(split.calls)), 0.0) != ""


def test_data_of_a_thousand_levels_is_wrong_and_breaks_nothing() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert not holds("assert f(1) == [[]]", deep)
    assert CallTest("f", (), [[]]).problem(finished(deep), 0.0) != ""


def test_evaluation_knows_no_other_names_than_those_of_calls() -> None:
    with pytest.raises(Refused, match="open"):
        asserts.split("assert f(1) == open")
    with pytest.raises(KeyError):
        Evaluator({}, 0.0)(ast.parse("call_0", mode="eval").body)


@pytest.mark.parametrize(("expected", "found"), [([3], 3), ([3], [3]), (3, 3), ([[3]], [3])])
def test_an_expected_list_of_one_stands_for_its_element_in_the_shape_of_apps(expected: Any, found: Any) -> None:
    assert CallTest("f", (), expected, wrapped=True).problem(finished(found), 0.0) == ""
    assert CallTest("f", (), [1, 2], wrapped=True).problem(finished(1), 0.0) == "expected [1, 2], found 1"
