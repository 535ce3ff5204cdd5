"""Verdicts without computer algebra agree with math-verify's."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.services.reward.scorers.answer.extraction import extract
from penstock.services.reward.scorers.answer.mathematics import comparison
from penstock.services.reward.scorers.answer.mathematics.plain_mathematics import Form, compare, read
from penstock.services.reward.scorers.answer.mathematics.polynomials import INFINITY, PI, Polynomial
from tests.reward.scorers.test_answer_corpus import EQUAL, UNEQUAL

NUMBERS = st.one_of(st.integers(0, 12), st.sampled_from([49, 60, 100, 128, 999, 1234])).map(str)
POSITIVE = st.one_of(st.integers(1, 12), st.sampled_from([49, 60, 100, 128, 999, 1234])).map(str)
LETTERS = st.sampled_from("xyznkab")


def _written(*parts: str | st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(*(st.just(part) if isinstance(part, str) else part for part in parts)).map("".join)


FRACTION = st.one_of(
    _written(st.sampled_from([r"\frac", r"\dfrac", r"\tfrac"]), "{", NUMBERS, "}{", POSITIVE, "}"),
    _written(r"\frac", st.sampled_from("123"), st.sampled_from("456")),
    _written(NUMBERS, "/", POSITIVE),
    _written(st.integers(1, 4).map(str), r"\frac{1}{", st.integers(2, 5).map(str), "}"),
)
ROOT = st.one_of(_written(r"\sqrt{", NUMBERS, "}"), _written(r"\sqrt", st.sampled_from("23457")))
SIMPLE = st.one_of(NUMBERS, FRACTION, ROOT, st.just(r"\pi"), _written("2^", st.sampled_from(["3", "{3}", "{10}"])))
TIMES = st.sampled_from(["", " ", r"\cdot ", r"\times ", "*", r"\,"])


def _composed(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        _written(inner, TIMES, inner),
        _written(inner, st.sampled_from(["+", "-", " + ", " - "]), inner),
        _written("(", inner, ")"),
        _written("(", inner, ")^", st.sampled_from("0123")),
        _written(r"\left(", inner, r"\right)", TIMES, inner),
        _written(r"\frac{", inner, "}{", POSITIVE, "}"),
        _written(inner, "/", POSITIVE),
        _written("-", inner),
    )


VALUE = st.recursive(SIMPLE, _composed, max_leaves=4)
POLYNOMIAL = st.recursive(
    st.one_of(SIMPLE, LETTERS, _written(LETTERS, "^2"), _written(NUMBERS, LETTERS)), _composed, max_leaves=5
)
NEGATIVE = _written(st.sampled_from(["", "-"]), st.one_of(SIMPLE, VALUE))
COMMA = st.sampled_from([",", ", "])
BRACKETED = _written(
    st.sampled_from(
        [("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"), (r"\left(", r"\right]"), (r"\{", r"\}"), ("", "")]
    ).flatmap(lambda pair: _written(pair[0], st.lists(NEGATIVE, min_size=1, max_size=3).map(", ".join), pair[1]))
)
TIGHT = _written(
    st.sampled_from("(["),
    NEGATIVE,
    ",",
    st.one_of(NEGATIVE, st.just(r"\infty"), st.just(r"+\infty")),
    st.sampled_from(")]"),
)
MATRIX = st.tuples(st.sampled_from("pb"), st.tuples(NEGATIVE, NEGATIVE, NEGATIVE, NEGATIVE)).map(
    lambda matrix: (
        rf"\begin{{{matrix[0]}matrix}}" + r"{}&{}\\{} & {}".format(*matrix[1]) + rf"\end{{{matrix[0]}matrix}}"
    )
)
EQUATION = _written(LETTERS, st.sampled_from(["=", " = "]), NEGATIVE)
TEXT = st.one_of(NEGATIVE, POLYNOMIAL, BRACKETED, TIGHT, MATRIX, EQUATION)


def _latex(value: Polynomial) -> str:
    terms = []
    for (letters, radicand), coefficient in value.terms.items():
        factors = [rf"\frac{{{coefficient.numerator}}}{{{coefficient.denominator}}}"]
        factors += [rf"\sqrt{{{radicand}}}"] * (radicand > 1)
        factors += [r"\pi" if letter == PI else letter for letter in letters]
        terms.append(r" \cdot ".join(factors))
    return " + ".join(terms) or "0"


def _plainly(form: Form) -> str:
    parts = [r"\infty" if INFINITY in part.letters else _latex(part) for part in form.parts]
    parts = [
        "-" + text if part.terms == {(INFINITY, 1): -1} else text for text, part in zip(parts, form.parts, strict=True)
    ]
    inside = ", ".join(parts)
    if form.kind == "matrix":
        columns = int(form.detail)
        rows = [" & ".join(parts[start : start + columns]) for start in range(0, len(parts), columns)]
        return r"\begin{pmatrix}" + r" \\ ".join(rows) + r"\end{pmatrix}"
    dress = {"equation": f"{form.detail} = {inside}", "set": rf"\{{{inside}\}}", "point": f"({inside})"}
    return f"{form.detail[0]}{inside}{form.detail[1]}" if form.kind == "interval" else dress.get(form.kind, inside)


def _computed(reference: str, answer: str) -> bool:
    verdict = comparison.compare(reference, answer)
    return verdict["status"] == "ok" and verdict["equal"] is True


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)


@pytest.mark.parametrize(
    ("reference", "answer", "equal"),
    [
        ("x^2+5x+6", "(x+2)(x+3)", True),
        ("x^2+5x+6", "(x+1)(x+6)", False),
        (r"2\sqrt{12}", r"4\sqrt{3}", True),
        (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}", True),
        (r"2\pi", r"\pi\cdot 2", True),
        (r"2\pi", r"\pi", False),
        (r"2\frac{1}{3}", r"\frac{7}{3}", True),
        ("(1,2]", r"\left(1, 2\right]", True),
        ("(1,2]", "[1,2]", False),
        (r"[1,\infty)", r"[1, +\infty)", True),
        (r"\{1,2,3\}", r"\{3, 1, 2\}", True),
        ("1, 2", "1, 3", False),
        ("(2,1)", "(2,1,3)", False),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1 & 2\\3 & 5\end{bmatrix}", False),
        ("5", "x = 5", True),
    ],
)
def test_plain_mathematics_is_compared_by_value(reference: str, answer: str, equal: bool) -> None:
    assert compare(reference, answer) is equal


@pytest.mark.parametrize(
    "text",
    [
        "5t", "1/2x", "2--3", "2^-1", "x^23", "2^2^2", "12,345", "1,234, 5", r"\{1,1\}", "[2,1]", "(1,1)", "ab", "x", "2 3", "0.5", r"50\%",
        "A", "e", r"\pm 3", r"\frac{1}{0}", r"\frac{1}{x}", r"\sqrt{x}", r"\sqrt{-1}", r"\sqrt[3]{8}", "x>3", r"2\infty", r"\ln 2", "", "=",
    ],
)  # fmt: skip
def test_what_may_mean_something_else_is_left_to_math_verify(text: str) -> None:
    assert read(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "9" * 100_000, "(" * 100, "x^" * 90, "(x+1)^{99}", "2^{99}", "((((2^9)^9)^9)^9)", "((x+1)^9+1)^9", "(x+y+z+a)^9", "-" * 200,
        r"\sqrt{999999999999}", r"\sqrt{" * 30, "1," * 90 + "1", "{" * 200, r"\frac" * 40,
    ],
)  # fmt: skip
def test_what_would_grow_is_not_computed(text: str) -> None:
    assert read(text) is None


@pytest.mark.parametrize("reference", ["5", "46", r"2\sqrt3", "x+1"])
def test_a_difference_of_too_many_terms_is_left_to_math_verify(reference: str) -> None:
    assert compare(reference, "(x+y+z)^9+(x+y)^8") is None  # 55 + 9 terms: the difference has too many


def test_numbers_too_close_to_tell_are_left_to_math_verify() -> None:
    near = r"\frac{100000000000}{100000000001}"
    assert compare("1+0", near) is None
    assert compare(rf"\{{1,{near},\sqrt{{2}}\}}", r"\{1,2,\sqrt{2}\}") is None
    assert compare(rf"\{{1,{near}\}}", r"\{1,2\}") is False


@pytest.mark.parametrize("table", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_the_corpus_has_the_same_verdicts_with_and_without(table: dict[str, list[tuple[str, str]]]) -> None:
    pairs = [(extract(a, "auto") or a, extract(b, "auto") or b) for kind in table.values() for a, b in kind]
    both = {pair: (verdict, _computed(*pair)) for pair in pairs if (verdict := compare(*pair)) is not None}
    assert len(both) >= 25
    assert set(both.values()) == {(table is EQUAL, table is EQUAL)}


@given(TEXT)
@settings(max_examples=40, derandomize=True)
def test_what_is_read_means_the_same_to_math_verify(text: str) -> None:
    form = read(text)
    if form is not None:
        assert _computed(_plainly(form), text), (text, _plainly(form))
        assert compare(_plainly(form), text) in (True, None)


@given(
    st.one_of(
        *(st.tuples(kind, kind) for kind in (NEGATIVE, POLYNOMIAL, BRACKETED, TIGHT, MATRIX)), st.tuples(TEXT, TEXT)
    )
)
@settings(max_examples=40, derandomize=True)
def test_a_verdict_is_that_of_math_verify(pair: tuple[str, str]) -> None:
    verdict = compare(*pair)
    if verdict is not None:
        assert verdict == _computed(*pair), pair
