"""Replace the steps of ``math-verify`` that take different formulas for equal ones.

Its numeric step drops every value below 1e-15, whatever the formula is worth (``evalf(chop=True)``); two equations without
real solutions are equal to it. Here a difference is zero if :func:`is_zero` or sympy's simplification shows it.
"""

from typing import Any

from penstock.services.reward.scorers.answer.mathematics.zero import is_zero

_REPLACED = ("sympy_numeric_eq", "sympy_symbolic_eq", "solve")


def replace_steps() -> None:
    """Patch the grader in this process, once. Raises RuntimeError: another release has no such steps."""
    from math_verify import grader

    missing = [name for name in _REPLACED if not hasattr(grader, name)]
    if missing:
        raise RuntimeError(
            f"math-verify has no {', '.join(missing)} to replace: install a release that Penstock is tested with"
        )
    of: Any = grader
    if getattr(of, "is_proven", False):
        return
    numerically, symbolically, solve = (getattr(of, name) for name in _REPLACED)

    def numerically_equal(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
        if _is_matrix(a) or _is_matrix(b) or _is_decimal(a) or _is_decimal(b):
            return bool(numerically(a, b, float_rounding, numeric_precision))
        return _is_zero(a, b) is True

    def symbolically_equal(a: Any, b: Any) -> bool:
        return _is_zero(a, b) is not False and bool(symbolically(exact(a), exact(b)))

    def solved(*equations: Any) -> Any:
        solutions = solve(*equations)
        if solutions == []:
            raise ValueError("no solution")
        return solutions

    of.sympy_numeric_eq, of.sympy_symbolic_eq, of.solve, of.is_proven = (
        numerically_equal,
        symbolically_equal,
        solved,
        True,
    )


def exact(expression: Any) -> Any:
    """Return decimals as fractions, and i as a number beside exponentials."""
    from sympy import Float, I, Rational, Symbol, exp

    if not hasattr(expression, "atoms"):
        return expression
    fractions = {number: Rational(str(number)) for number in expression.atoms(Float) if number.is_finite}
    replaced = expression.xreplace(fractions) if fractions else expression
    if replaced.has(exp):
        replaced = replaced.xreplace({symbol: I for symbol in replaced.atoms(Symbol) if symbol.name == "i"})
    return replaced


def _is_zero(a: Any, b: Any) -> bool | None:
    try:
        difference = exact(a).doit() - exact(b).doit()
        if not _is_matrix(difference):
            return is_zero(difference)
        verdicts = {is_zero(entry) for entry in difference}
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 (what sympy cannot evaluate is undecided)
        return None
    return False if False in verdicts else None if None in verdicts else True


def _is_matrix(side: Any) -> bool:
    from sympy import MatrixBase, MatrixExpr

    return isinstance(side, (MatrixBase, MatrixExpr))


def _is_decimal(side: Any) -> bool:
    from math_verify.grader import is_atomic_or_pct_atomic
    from sympy import Float

    return bool(is_atomic_or_pct_atomic(side, Float))
