"""Zero is shown or refuted by digits, and math-verify's own numeric step is replaced."""

from typing import Any

import pytest
from sympy import I, Rational, cos, exp, factorial, log, oo, pi, sin, sqrt, symbols

from penstock.services.reward.scorers.answer.mathematics import proven_equality
from penstock.services.reward.scorers.answer.mathematics.zero import is_zero

X = symbols("x", real=True)


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [
        (exp(-50) - exp(-60), False),
        (log(1 + exp(-100)), False),
        (cos(exp(-200)) - 1, False),
        (exp(pi * sqrt(163)) - 640320**3 - 744, False),
        ((sqrt(10**40 + 1) - 10**20) ** 3, False),
        (sqrt(2) / 10**3000, False),
        (factorial(20) * Rational(20) ** -20 - factorial(19) * Rational(20) ** -19, True),
        (sqrt(2 + sqrt(3)) - (sqrt(6) + sqrt(2)) / 2, True),
        (sin(pi / 12) - (sqrt(6) - sqrt(2)) / 4, True),
        (exp(I * pi / 7) - cos(pi / 7) - I * sin(pi / 7), True),
        ((exp(-90) * X - exp(-91) * X), False),
        (sin(X) ** 2 + cos(X) ** 2 - 1, None),
        (oo - X, None),
        (exp(10**6) * sqrt(2) - exp(10**6 - 1) * exp(1) * sqrt(2), True),
    ],
)
def test_a_difference_is_zero_not_zero_or_undecided(difference: Any, verdict: bool | None) -> None:
    assert is_zero(difference) is verdict


def test_a_release_of_math_verify_without_the_steps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("math_verify.grader.sympy_numeric_eq")
    with pytest.raises(RuntimeError, match="math-verify has no sympy_numeric_eq to replace"):
        proven_equality.replace_steps()
