"""Numbers that need no computer algebra: read exactly from short text, and compared as exact fractions.

Only text of at most 100 characters that a strict pattern matches is read, exponents have at most three digits, and
nothing is evaluated, so that reading costs microseconds whatever a model writes.
"""

import dataclasses
import re
from fractions import Fraction
from functools import lru_cache

LONGEST = 100

_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_PATTERN = re.compile(
    rf"(?P<sign>[-+]?)\$?(?:(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}}))?"
    r"|(?P<above>[0-9]+)\s?/\s?(?P<below>[0-9]+)"
    r"|\\[dt]?frac\{(?P<numerator>[0-9]+)\}\{(?P<denominator>[0-9]+)\})(?P<percent>\s?\\?%)?"
)


@dataclasses.dataclass(frozen=True, slots=True)
class PlainNumber:
    """A number as it was written.

    >>> read("12.5%")
    PlainNumber(value=Fraction(25, 2), percent=True, rounded=True)
    """

    value: Fraction
    """Before the percent sign divides it."""
    percent: bool = False
    rounded: bool = False
    """Written with a decimal point or an exponent, so that it may stand for its neighbours."""

    @property
    def share(self) -> Fraction:
        """The number itself: 50 % is one half."""
        return self.value / 100 if self.percent else self.value


def read(text: str) -> PlainNumber | None:
    """Return the number that ``text`` is; None where it is no plain number."""
    return _read(text) if len(text) <= LONGEST else None


@lru_cache(maxsize=8192)
def _read(text: str) -> PlainNumber | None:
    text = _bare(text)
    if text.isascii() and text.isdigit():
        return PlainNumber(Fraction(int(text)))
    match = _PATTERN.fullmatch(text)
    return None if match is None else _number(match)


def _bare(text: str) -> str:
    """Take away what stands around a number: spaces, dollar signs of mathematics, a full stop, escapes."""
    text = text.strip()
    if len(text) > 2 and text[0] == "$" == text[-1]:
        text = text[1:-1].strip()
    return text.removesuffix(".").replace("−", "-").replace("\\$", "$")


def _number(match: re.Match[str]) -> PlainNumber | None:
    decimal = match["decimal"]
    if decimal is not None:
        value = Fraction(f"{decimal.replace(',', '')}e{match['exponent'] or 0}")
    else:
        below = int(match["below"] or match["denominator"])
        if below == 0:
            return None
        value = Fraction(int(match["above"] or match["numerator"]), below)
    return PlainNumber(
        value=-value if match["sign"] == "-" else value,
        percent=match["percent"] is not None,
        rounded=decimal is not None and ("." in decimal or match["exponent"] is not None),
    )


def close(a: PlainNumber, b: PlainNumber, tolerance: Fraction) -> bool:
    """Whether two numbers differ by at most ``tolerance`` times the larger one.

    50 % is 0.5; and where only one of the two has a percent sign, 50 % is 50 too, as people answer "what percentage".
    """
    if _within(a.share, b.share, tolerance):
        return True
    return a.percent != b.percent and _within(a.value, b.value, tolerance)


def _within(a: Fraction, b: Fraction, tolerance: Fraction) -> bool:
    return a == b or (tolerance > 0 and abs(a - b) <= tolerance * max(abs(a), abs(b)))
