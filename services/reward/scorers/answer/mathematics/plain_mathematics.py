"""Answers that need no computer algebra: polynomials in a few letters, π and square roots, and intervals, points, sets,
lists and matrices of such numbers, compared exactly.

::

    text ── short, every token known ──▶ Form ── both forms of one kind, nothing ambiguous ──▶ equal, or not
                 └── no ──▶ None                  └── no ──▶ None

``None`` leaves the verdict to math-verify. Verdicts agree with it, so text that it reads in its own way (``5t`` as 5
tons, ``1/2x`` as 1/(2x)) is not read here. Length, nesting and numbers are bounded.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, TypeAlias

from penstock.services.reward.scorers.answer.mathematics import polynomials
from penstock.services.reward.scorers.answer.mathematics.polynomials import (
    INFINITY,
    PI,
    Polynomial,
    TooLarge,
    approximate,
    square_root,
)

LONGEST = 200
_DEEPEST = 8
_MOST_IRRATIONAL = 12
"""Limit for lists with roots or π, compared pairwise."""
_LETTERS = "xyznkab"
"""Always variables, never units, constants or functions."""
_TOKEN = re.compile(
    rf"(?P<number>[0-9]{{1,30}})|(?P<letter>[{_LETTERS}])|(?P<sign>[-+*/^(){{}}\[\],=&])"
    r"|(?P<command>\\(?:[dt]?frac|sqrt|pi|infty|cdot|times|left|right)(?![A-Za-z]))"
    r"|(?P<brace>\\[{}])|(?P<row>\\\\)|(?P<matrix>\\(?:begin|end)\{[pb]matrix\})|(?P<space> +|\\[ ,;])"
)
_THOUSANDS = re.compile(r"[0-9],[0-9]{3}(?![0-9])")
_FRACTIONS = (r"\frac", r"\dfrac", r"\tfrac")
_UNSEEN = (r"\left", r"\right")

FormKind: TypeAlias = Literal["value", "equation", "interval", "point", "set", "list", "matrix"]


@dataclasses.dataclass(frozen=True)
class Form:
    r"""A parsed text.

    >>> form = read(r"\left[1, \frac{3}{2}\right)")
    >>> form.kind, form.detail, [float(part.rational) for part in form.parts]
    ('interval', '[)', [1.0, 1.5])
    """

    kind: FormKind
    detail: str
    """Brackets of an interval, variable of an equation, columns of a matrix; otherwise empty."""
    parts: tuple[Polynomial, ...]


def compare(reference: str, answer: str) -> bool | None:
    expected, given = read(reference), read(answer)
    if expected is None or given is None:
        return None
    try:
        return _same(expected, given)
    except TooLarge:  # the difference has too many terms
        return None


def _same(expected: Form, given: Form) -> bool | None:
    if {expected.kind, given.kind} == {"value", "equation"}:  # 5 and x=5
        constant = all(form.parts[0].constant for form in (expected, given))
        return polynomials.equal(expected.parts[0], given.parts[0]) if constant else None
    if expected.kind != given.kind or (expected.kind == "equation" and expected.detail != given.detail):
        return None
    if expected.kind in ("set", "list"):
        return _same_members(expected.parts, given.parts)
    if expected.detail != given.detail or len(expected.parts) != len(given.parts):
        return False
    return _all(polynomials.equal(*pair) for pair in zip(expected.parts, given.parts, strict=True))


def _same_members(expected: tuple[Polynomial, ...], given: tuple[Polynomial, ...]) -> bool | None:
    """Compare as sets; neither has duplicates."""
    if all(part.rational is not None for part in (*expected, *given)):
        return {part.rational for part in expected} == {part.rational for part in given}
    verdicts = [[polynomials.equal(a, b) for b in given] for a in expected]
    if any(None in row for row in verdicts):
        return None
    return len(expected) == len(given) and all(True in row for row in verdicts)


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    distinct = set(verdicts)
    return False if False in distinct else None if None in distinct else True


def read(text: str) -> Form | None:
    """Parse ``text``; None if math-verify might read it differently."""
    return _read(text) if len(text) <= LONGEST else None


@lru_cache(maxsize=8192)
def _read(text: str) -> Form | None:
    text = text.strip()
    try:
        reader = _Reader(_tokens(text))
        form = reader.form()
        reader.expect("")
    except (_Unknown, TooLarge):
        return None
    return None if form.kind == "list" and _THOUSANDS.search(text) else form


class _Unknown(ValueError):
    """Something else, or ambiguous."""


def _tokens(text: str) -> list[str]:
    tokens, place = list[str](), 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise _Unknown(text[place])
        place = match.end()
        if match.lastgroup != "space":
            tokens.append(match[0])
    if tokens.count(r"\left") != tokens.count(r"\right"):
        raise _Unknown(r"\left without \right")
    return [*(token for token in tokens if token not in _UNSEEN), ""]


class _Reader:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0
        self._depth = 0

    @property
    def _next(self) -> str:
        return self._tokens[self._place]

    def _take(self) -> str:
        token = self._next
        self._place += 1
        return token

    def expect(self, *tokens: str) -> str:
        if self._next not in tokens:
            raise _Unknown(self._next)
        return self._take()

    def form(self) -> Form:
        if self._next == r"\{":
            return self._set()
        if self._next.startswith(r"\begin"):
            return self._matrix()
        if self._next and self._next in _LETTERS and self._tokens[self._place + 1] == "=":
            return self._equation()
        if self._next in ("(", "[") and (form := self._bracketed()) is not None:
            return form
        parts = self._parts()
        if len(parts) > 1:
            return Form("list", "", _different(parts))
        (value,) = parts
        if len(value.terms) == 1 and not value.constant and value.terms.keys() == {(value.letters, 1)}:
            raise _Unknown("a lone letter or a word")
        return Form("value", "", _finite(parts))

    def _equation(self) -> Form:
        variable = self._take()
        self.expect("=")
        value = self._sum()
        if not value.terms:
            raise _Unknown("x=0, which is compared as a lone letter")
        return Form("equation", variable, _constants(_finite((value,))))

    def _set(self) -> Form:
        self.expect(r"\{")
        parts = self._parts()
        self.expect(r"\}")
        return Form("set", "", _different(parts))

    def _matrix(self) -> Form:
        shape = self._take().removeprefix(r"\begin")
        rows = [self._parts("&")]
        while self._next == r"\\":
            self._take()
            rows.append(self._parts("&"))
        self.expect(rf"\end{shape}")
        if len({len(row) for row in rows}) != 1:
            raise _Unknown("rows of different length")
        return Form("matrix", str(len(rows[0])), _constants(_finite([part for row in rows for part in row])))

    def _bracketed(self) -> Form | None:
        place = self._place
        opening = self._take()
        parts = self._parts()
        if len(parts) == 1 and opening == "(":
            self._place = place
            return None
        brackets = opening + self.expect(")", "]")
        if len(parts) == 2 and _increasing(*parts):
            return Form("interval", brackets, _constants(parts))
        if len(parts) == 1 or brackets != "()":
            raise _Unknown("brackets of another kind")
        return Form("point", "", _constants(_finite(parts)))

    def _parts(self, separator: str = ",") -> tuple[Polynomial, ...]:
        parts = [self._sum()]
        while self._next == separator:
            self._take()
            parts.append(self._sum())
        return tuple(parts)

    def _sum(self) -> Polynomial:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _Unknown("too deep")
        negative = self._next in ("+", "-") and self._take() == "-"
        total = self._product()
        total = -total if negative else total
        while self._next in ("+", "-"):
            sign = self._take()
            term = self._product()
            total = total + term if sign == "+" else total - term
        self._depth -= 1
        return total

    def _product(self) -> Polynomial:
        whole = self._next.isdigit()
        product = self._power()
        if whole and self._next in _FRACTIONS:
            return self._mixed(product)
        while True:
            if self._next in ("*", r"\cdot", r"\times"):
                self._take()
                product = product * self._power()
            elif self._next == "/":
                self._take()
                return product / self._atom()  # what follows may belong to the divisor: the caller refuses it
            elif self._next in ("(", r"\sqrt", r"\pi", r"\infty", *_LETTERS):
                product = product * self._power()
            else:
                return product

    def _mixed(self, whole: Polynomial) -> Polynomial:
        """Read the fraction of a mixed number: 2⅓ is 2 + ⅓."""
        share = self._atom()
        if share.rational is None or not 0 < share.rational < 1 or whole.rational is None:
            raise _Unknown("a product with a fraction")
        return whole + share

    def _power(self) -> Polynomial:
        base = self._atom()
        if self._next != "^":
            return base
        self._take()
        braced = self._next == "{"
        if braced:
            self._take()
        exponent = self._take()
        if not exponent.isdigit() or len(exponent) > (2 if braced else 1):
            raise _Unknown(exponent)
        if braced:
            self.expect("}")
        if self._next == "^":
            raise _Unknown("a tower of powers")
        return base ** int(exponent)

    def _atom(self) -> Polynomial:
        symbol = self._take()
        if symbol.isdigit():
            return Polynomial.number(int(symbol))
        if symbol == "(":
            value = self._sum()
            self.expect(")")
            return value
        if symbol in _FRACTIONS:
            return self._fraction()
        if symbol == r"\sqrt":
            return square_root(self._argument())
        if symbol in (r"\pi", r"\infty"):
            return Polynomial.letter(PI if symbol == r"\pi" else INFINITY)
        if symbol and symbol in _LETTERS:
            return Polynomial.letter(symbol)
        raise _Unknown(symbol)

    def _fraction(self) -> Polynomial:
        if self._next.isdigit() and len(self._next) == 2:  # \frac12
            above, below = divmod(int(self._take()), 10)
            return Polynomial.number(above) / Polynomial.number(below)
        return self._argument() / self._argument()

    def _argument(self) -> Polynomial:
        if len(self._next) == 1 and self._next.isdigit():
            return self._atom()
        self.expect("{")
        value = self._sum()
        self.expect("}")
        return value


def _increasing(start: Polynomial, end: Polynomial) -> bool:
    _constants((start, end))
    if math.isinf(approximate(start)) or math.isinf(approximate(end)):
        return approximate(start) < approximate(end)
    if polynomials.equal(start, end) is not False:
        raise _Unknown("an interval of one point")
    return approximate(start) < approximate(end)


def _constants(parts: tuple[Polynomial, ...]) -> tuple[Polynomial, ...]:
    for part in parts:
        if not part.constant or (INFINITY in part.letters and part.terms not in _INFINITIES):
            raise _Unknown("a letter")
    return parts


_INFINITIES = [Polynomial.letter(INFINITY).terms, (-Polynomial.letter(INFINITY)).terms]


def _finite(parts: Sequence[Polynomial]) -> tuple[Polynomial, ...]:
    if any(INFINITY in part.letters for part in parts):
        raise _Unknown("infinity")
    return tuple(parts)


def _different(parts: tuple[Polynomial, ...]) -> tuple[Polynomial, ...]:
    rational = {part.rational for part in _constants(_finite(parts))}
    if None not in rational and len(rational) == len(parts):
        return parts
    if len(parts) > _MOST_IRRATIONAL:
        raise _Unknown("too many members to compare each with each")
    for index, part in enumerate(parts):
        if any(polynomials.equal(part, other) is not False for other in parts[:index]):
            raise _Unknown("a set that has something twice")
    return parts
