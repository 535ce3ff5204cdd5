"""Exact arithmetic of small polynomials with rational coefficients in letters, π and square roots.

A polynomial maps monomials (sorted letters and one square-free radicand) to coefficients. Monomials are linearly
independent over the rationals, so equal maps mean equal polynomials. :class:`TooLarge` is raised before computation.
"""

import dataclasses
import math
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

PI = "π"
INFINITY = "∞"
"""Alone or with a sign; the reader ensures this."""
MOST_TERMS = 64
HIGHEST_DEGREE = 16
LARGEST_RADICAND = 1_000_000
_LARGEST_PRODUCT = LARGEST_RADICAND**2
_LARGEST_INTEGER = 2**256
_SHOWN_DIFFERENT = 1e-9
"""Smaller differences, relative to the terms, are undecided."""

Monomial: TypeAlias = tuple[str, int]
Coefficient: TypeAlias = int | Fraction
"""Integers are kept as int for speed."""


class TooLarge(ValueError):
    """The result would exceed the limits."""


@dataclasses.dataclass(frozen=True)
class Polynomial:
    """The sum of ``coefficient · letters · √radicand``.

    >>> square_root(Polynomial.number(8)).terms
    {('', 2): 2}
    """

    terms: dict[Monomial, Coefficient]
    """Without zeros."""

    @staticmethod
    def number(value: Coefficient) -> "Polynomial":
        return _bounded({("", 1): value})

    @staticmethod
    def letter(name: str) -> "Polynomial":
        return Polynomial({(name, 1): 1})

    @property
    def rational(self) -> Coefficient | None:
        """The value; None with letters or roots."""
        if not self.terms:
            return 0
        return self.terms.get(("", 1)) if len(self.terms) == 1 else None

    @property
    def letters(self) -> str:
        """Letters and π, with repetition."""
        return "".join(letters for letters, _ in self.terms)

    @property
    def constant(self) -> bool:
        """Whether there is no letter except π and ∞."""
        return not self.letters.strip(PI + INFINITY)

    def __add__(self, other: "Polynomial") -> "Polynomial":
        terms = dict(self.terms)
        for monomial, coefficient in other.terms.items():
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return _bounded(terms)

    def __neg__(self) -> "Polynomial":
        return Polynomial({monomial: -coefficient for monomial, coefficient in self.terms.items()})

    def __sub__(self, other: "Polynomial") -> "Polynomial":
        return self + -other

    def __mul__(self, other: "Polynomial") -> "Polynomial":
        if len(self.terms) * len(other.terms) > 4 * MOST_TERMS:
            raise TooLarge("too many terms")
        terms: dict[Monomial, Coefficient] = {}
        for (letters, radicand), coefficient in self.terms.items():
            for (more_letters, more_radicand), more in other.terms.items():
                common = math.gcd(radicand, more_radicand)
                monomial = "".join(sorted(letters + more_letters)), radicand * more_radicand // common**2
                terms[monomial] = terms.get(monomial, 0) + coefficient * more * common
        return _bounded(terms)

    def __pow__(self, exponent: int) -> "Polynomial":
        if exponent > HIGHEST_DEGREE:
            raise TooLarge("too high a power")
        product = Polynomial.number(1)
        for _ in range(exponent):
            product = product * self
        return product

    def __truediv__(self, other: "Polynomial") -> "Polynomial":
        if len(other.terms) != 1 or other.letters:
            raise TooLarge("a quotient that is no polynomial")
        (((_, radicand), coefficient),) = other.terms.items()
        return self * Polynomial({("", radicand): Fraction(1) / (coefficient * radicand)})


def square_root(of: Polynomial) -> Polynomial:
    """Raises TooLarge for a negative number, or one too large to factor."""
    number = of.rational
    if number is None or number < 0 or number.numerator * number.denominator > LARGEST_RADICAND:
        raise TooLarge("a root of more than a small number")
    outside, inside = _squares_out(number.numerator * number.denominator)
    coefficient = outside if number.denominator == 1 else Fraction(outside, number.denominator)
    return _bounded({("", inside): coefficient})


@lru_cache(maxsize=4096)
def _squares_out(number: int) -> tuple[int, int]:
    """Return (a, b) with ``number = a² b`` and b square-free; b is 1 for 0."""
    outside, inside, factor = (1, number, 2) if number else (0, 1, 2)
    while factor * factor <= inside:
        while inside % (factor * factor) == 0:
            inside //= factor * factor
            outside *= factor
        factor += 1
    return outside, inside


def approximate(constant: Polynomial) -> float:
    return sum(_approximate(*term) for term in constant.terms.items())


def equal(a: Polynomial, b: Polynomial) -> bool | None:
    """Whether two polynomials are equal; None if they are too close to tell."""
    difference = (a - b).terms
    if not difference:
        return True
    by_letters: dict[str, float] = {}
    for (letters, radicand), coefficient in difference.items():
        key = letters.replace(PI, "")
        by_letters[key] = by_letters.get(key, 0.0) + _approximate((letters, radicand), coefficient)
    size = max(1.0, *(abs(_approximate(*term)) for term in (*a.terms.items(), *b.terms.items())))
    return False if any(abs(value) > _SHOWN_DIFFERENT * size for value in by_letters.values()) else None


def _approximate(monomial: Monomial, coefficient: Coefficient) -> float:
    letters, radicand = monomial
    if letters == INFINITY:
        return math.copysign(math.inf, coefficient)
    return float(coefficient) * math.sqrt(radicand) * math.pi ** letters.count(PI)


def _bounded(terms: dict[Monomial, Coefficient]) -> Polynomial:
    terms = {monomial: coefficient for monomial, coefficient in terms.items() if coefficient}
    if len(terms) > MOST_TERMS:
        raise TooLarge("too many terms")
    for (letters, radicand), coefficient in terms.items():
        if len(letters) > HIGHEST_DEGREE or radicand > _LARGEST_PRODUCT:
            raise TooLarge("too high a degree")
        if abs(coefficient.numerator) > _LARGEST_INTEGER or coefficient.denominator > _LARGEST_INTEGER:
            raise TooLarge("too large a coefficient")
    return Polynomial(terms)
