r"""Compare pairs of formulas with ``math-verify``: the program of a matcher process.

::

    question   {"reference": "\\frac{1}{2}", "answer": "0.5", "tolerance": 1e-06}
    question   {"reference": "4", "completion": "So it is $4$."}: math-verify's own verdict
    answer     {"status": "ok", "equal": true, "rounded": false, "detail": ""}

Decimals are read as fractions; ``rounded`` means equal within the tolerance only. Computer algebra may hang or
exhaust memory, so the parent kills a late process, and math-verify's signal-based deadlines are off.
"""

import contextlib
import logging
import re
import sys
from functools import lru_cache
from itertools import product
from typing import Any

from penstock.services.reward.scorers.answer.mathematics import bounds, latex_parser
from penstock.services.reward.scorers.answer.mathematics.proven_equality import exact, replace_steps
from penstock.services.reward.subprocess_pool import child

_DEEPEST = 16
"""The parser's time grows exponentially with nesting: minutes at depth 20."""
_NUMBER_NEXT = re.compile(r"\s*[0-9]")
_IS_VALUE = re.compile(r"(?<!\\begin\{array)\}$|\\sqrt(?:\[[^\[\]]*\])?$|(?<![\\a-z][a-z]{2})(?<!\\ln)(?<!\\lg)\^$")
"""Before a group that is a value by itself: the second argument of a fraction, the argument of a root, a power."""
_MATHEMATICS = ("$", r"\boxed", r"\(", r"\[")
"""Marks of mathematics in text; a reference in LaTeX without one is all mathematics."""
_MEMORY_BYTES = 2 * 1024**3
_DIGITS = 30
_WARM_UP = (
    (r"\frac{1}{2}", "0.5"),
    ("(1,2]", "[1,2]"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"50\%", "1/2"),
    (r"x^2+5x+6", "(x+2)(x+3)"),
    (r"\{1,2,-3\}", r"\{-3, 2, 1\}"),
    (r"[1,\infty)", r"\left[1, +\infty\right)"),
    (r"\begin{pmatrix}1&0\\1&2\end{pmatrix}", r"\begin{bmatrix} 1 & 0 \\ 1 & 2 \end{bmatrix}"),
    (r"2\pi", r"\pi\cdot 2"),
)
"""Usual forms, which warm up the parser."""


def read(text: str) -> list[Any]:
    """Return sympy expressions, followed by the text they were read from."""
    from math_verify import LatexExtractionConfig, parse

    if depth(text) > _DEEPEST:
        raise ValueError(f"nested deeper than {_DEEPEST}")
    text = with_products(text)
    return list(parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None, raise_on_error=True))


def with_products(text: str) -> str:
    r"""Write the product of a group and the number after it, which the parser reads digit by digit or as a sum.

    >>> print(with_products(r"\frac{e^{-2}20^{3}}{(2)45}"), with_products(r"\frac{1}2"), with_products(r"\log_{2}8"))
    \frac{e^{-2}\cdot 20^{3}}{(2)\cdot 45} \frac{1}2 \log_{2}8
    """
    opened, inserted = list[int](), list[int]()
    for place, character in enumerate(text):
        if character in "({":
            opened.append(place)
        elif character in ")}" and opened:
            before = text[: opened.pop()]
            if _NUMBER_NEXT.match(text, place + 1) and (character == ")" or _IS_VALUE.search(before)):
                inserted.append(place + 1)
    for place in reversed(inserted):
        text = rf"{text[:place]}\cdot {text[place:].lstrip()}"
    return text


def depth(text: str) -> int:
    r"""Return the nesting depth of brackets in ``text``, closed or not.

    >>> depth(r"\frac{1}{(2+x)}")
    2
    """
    deepest = level = 0
    for character in text:
        level = max(level + (character in "([{") - (character in ")]}"), 0)
        deepest = max(deepest, level)
    return deepest


def compare(reference: str, answer: str, tolerance: float = 0.0) -> dict[str, object]:
    try:
        candidates = read(answer)
    except (MemoryError, RecursionError) as error:
        return _verdict("crashed", f"reading it raised {type(error).__name__}")
    except Exception as error:  # noqa: BLE001 (the edge of the process: any complaint of the library is a verdict)
        return _verdict("wrong_format", f"cannot be read: {type(error).__name__}")
    if not candidates:
        return _verdict("wrong_format", "no mathematics found")
    pairs = list(product(_read_reference(reference), candidates))
    try:
        open_pairs = [pair for pair in ((exact(a), exact(b)) for a, b in pairs) if not bounds.differ(*pair)]
        if any(map(_too_large, open_pairs)):
            return _verdict("timeout", "computing it would take too long")
        if any(_same(*pair) for pair in open_pairs):
            return _verdict("ok", equal=True)
        rounded = tolerance > 0 and any(_near(expected, given, tolerance) for expected, given in pairs)
    except (MemoryError, RecursionError) as error:
        return _verdict("crashed", f"comparing it raised {type(error).__name__}")
    return _verdict("ok", equal=rounded, rounded=rounded)


def grade(reference: str, completion: str) -> dict[str, object]:
    """Return math-verify's own verdict with its default settings, but for the steps of :mod:`proven_equality`."""
    from math_verify import parse, verify

    replace_steps()
    is_text = any(mark in reference for mark in _MATHEMATICS) or not re.search(r"[\\{}^_]", reference)
    text = reference if is_text else rf"\boxed{{{reference}}}"
    try:
        expected, given = (parse(side, parsing_timeout=None) for side in (text, completion))
        return _verdict("ok", equal=bool(verify(expected, given, timeout_seconds=None)))
    except (MemoryError, RecursionError) as error:
        return _verdict("crashed", f"comparing it raised {type(error).__name__}")


def _too_large(pair: tuple[Any, Any]) -> bool:
    formulas = not any(isinstance(side, str) for side in pair)
    return formulas and pair[0] != pair[1] and any(bounds.too_large(side) for side in pair)


@lru_cache(maxsize=256)
def _read_reference(text: str) -> tuple[Any, ...]:
    """Cached for the group; the text itself if it cannot be read."""
    with contextlib.suppress(Exception):
        return tuple(read(text)) or (text,)
    return (text,)


def _same(reference: Any, candidate: Any) -> bool:
    from math_verify import verify
    from sympy import S, Symbol

    replace_steps()
    try:
        if reference is S.EmptySet and candidate is S.EmptySet:
            return False  # intervals whose ends are the wrong way round; the empty set itself is compared as text
        if isinstance(reference, Symbol) or isinstance(
            candidate, Symbol
        ):  # math-verify confuses x with X, and no with on
            return bool((reference - candidate).simplify() == 0)
        return bool(verify(reference, candidate, float_rounding=_DIGITS, timeout_seconds=None, raise_on_error=True))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 (what sympy cannot compare is not shown to be equal)
        return False


def _near(reference: Any, candidate: Any, tolerance: float) -> bool:
    from sympy import Float

    if not all(hasattr(side, "atoms") for side in (reference, candidate)):
        return False
    if not (reference.atoms(Float) or candidate.atoms(Float)):
        return False
    try:
        return _near_members(reference, candidate, tolerance)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 (what cannot be evaluated is not shown to be near)
        return False


def _near_members(reference: Any, candidate: Any, tolerance: float) -> bool:
    from sympy import Interval, MatrixBase, Tuple

    for kind in (Tuple, MatrixBase, Interval):
        if isinstance(reference, kind) and isinstance(candidate, kind):
            if kind is Interval and (reference.left_open, reference.right_open) != (
                candidate.left_open,
                candidate.right_open,
            ):
                return False
            sides = [[side.start, side.end] if kind is Interval else list(side) for side in (reference, candidate)]
            shapes = [
                getattr(side, "shape", len(members))
                for side, members in zip((reference, candidate), sides, strict=True)
            ]
            return shapes[0] == shapes[1] and all(_near_members(a, b, tolerance) for a, b in zip(*sides, strict=True))
    return _near_numbers(reference, candidate, tolerance)


def _near_numbers(reference: Any, candidate: Any, tolerance: float) -> bool:
    expected, given = exact(reference).doit(), exact(candidate).doit()
    if expected == given:
        return True
    if expected.is_integer or given.is_integer or expected.free_symbols or given.free_symbols:
        return False
    difference, *sides = (part.evalf(_DIGITS, strict=True) for part in (expected - given, expected, given))
    return bool(abs(difference) <= tolerance * max(map(abs, sides)))


def _verdict(status: str, detail: str = "", *, equal: bool = False, rounded: bool = False) -> dict[str, object]:
    return {"status": status, "equal": equal, "rounded": rounded, "detail": detail}


def _prepare() -> child.Answerer:
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    latex_parser.predict_quickly()
    for reference, answer in _WARM_UP:
        compare(reference, answer)
    return lambda question: grade(**question) if "completion" in question else compare(**question)


if __name__ == "__main__":
    child.serve(_prepare, parent=int(sys.argv[1]), memory_bytes=_MEMORY_BYTES, computes=True)
