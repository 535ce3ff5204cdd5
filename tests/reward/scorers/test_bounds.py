"""Checks of expressions before sympy: only different ones differ, and usual ones are not too large."""

from typing import Any

import pytest

from penstock.services.reward.scorers.answer.mathematics import bounds
from penstock.services.reward.scorers.answer.mathematics.comparison import compare, read


def expression(text: str) -> Any:
    return read(text)[0]


@pytest.mark.parametrize(
    ("formula", "other"),
    [
        ("(x+1)^2", "x^2+2x+1"),
        ("(X+1)^2", "x^2+2x+1"),
        (r"\frac{x^2-1}{x-1}", "x+1"),
        (r"\frac{1}{2}+\frac{1}{3}", r"\frac{5}{6}"),
        ("2^{-10}", r"\frac{1}{1024}"),
        ("(a+b+c)^8", "(c+b+a)^8"),
        (r"\pi+\pi", r"2\pi"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        (r"\sin^2(x)+\cos^2(x)", "1"),
    ],
)
def test_equal_formulas_never_differ(formula: str, other: str) -> None:
    assert not bounds.differ(expression(formula), expression(other))


@pytest.mark.parametrize(
    ("formula", "other"),
    [
        ("(x+1)^2", "x^2+2x+2"),
        ("(x+y+z)^{50}", "3x+1"),
        ("2^{10^{9}}", "2^{10^{9}+1}"),
        (r"\pi", r"\frac{22}{7}"),
        ("1e1/" * 40 + "7", "5"),
    ],
)
def test_formulas_with_different_residues_differ(formula: str, other: str) -> None:
    assert bounds.differ(expression(formula), expression(other))


@pytest.mark.parametrize(
    "text",
    ["2^{2023}", "100!", r"\binom{2023}{1011}", "(1+x)^{1000}", "(x+y+z)^{40}", r"\sqrt[3]{2}", "2^{-500000}", "n!", "x^{y^z}"],
)  # fmt: skip
def test_what_people_write_is_not_too_large(text: str) -> None:
    assert not bounds.too_large(expression(text))


@pytest.mark.parametrize(
    "text",
    ["9^{9^{9^9}}", "46!!!!!", r"\binom{10^9}{10^8}", "(x+y+z)^{900}", "10^{10^{10}}", "(x+1)^{46^9}", "2^{10^{50}}"],
)
def test_what_would_take_for_ever_is_too_large(text: str) -> None:
    assert bounds.too_large(expression(text))


def test_a_tolerance_holds_for_formulas_that_differ() -> None:
    assert compare(r"\frac{1}{3}", "0.333333333", 1e-6)["equal"] is True
    assert compare(r"\frac{1}{3}", "0.3333", 1e-6)["equal"] is False
