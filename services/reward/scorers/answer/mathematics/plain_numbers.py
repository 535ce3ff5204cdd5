"""Read numbers exactly from text of at most 100 characters, with exponents of at most three digits, and compare them."""

import dataclasses
import re
from fractions import Fraction
from functools import lru_cache

LONGEST = 100

_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_PATTERN = re.compile(
    rf"(?P<sign>[-+]?)\s?\$?(?:(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}}))?"
    r"|(?P<above>[0-9]+)\s?/\s?(?P<below>[0-9]+)"
    r"|\\[dt]?frac\{(?P<numerator>[0-9]+)\}\{(?P<denominator>[0-9]+)\})(?P<percent>\s?\\?%)?"
)
_SCIENTIFIC = re.compile(
    r"(?P<sign>[-+]?)\s?(?P<mantissa>[0-9]+(?:\.[0-9]+)?)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*(?P<power>[-+]?[0-9]{1,3})\s*\}?"
)
_SPACED = re.compile(r"[-+]?[0-9]{1,3}(?:(?:\\,|\\ | )[0-9]{3})+(?:\.[0-9]+)?")
_MIXED = re.compile(
    r"(?P<sign>[-+]?)\s?(?P<whole>[0-9]{1,30})(?:\s*\\frac\s*(?:\{(?P<above>[0-9]{1,30})\}\s*\{(?P<below>[0-9]{1,30})\}|(?P<digits>[0-9]{2}))"
    r"|\s+(?P<numerator>[0-9]{1,30})/(?P<denominator>[0-9]{1,30}))"
)
_SIGNED = re.compile(
    rf"(?P<sign>[-+]?)\s?\\[dt]?frac\s*(?:\{{\s*(?P<above>[-+]?(?:{_DECIMAL}))\s*\}}\s*\{{\s*(?P<below>[-+]?(?:{_DECIMAL}))\s*\}}|(?P<digits>[0-9]{{2}}))"
)
_REPEATING = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>[0-9]{0,30})\.(?P<fixed>[0-9]{0,30})(?:\\(?:overline|bar|dot)\s*\{?(?P<over>[0-9]{1,30})\}?|\((?P<round>[0-9]{1,30})\))"
)
_BASE = re.compile(
    r"(?:\\text\{\s*)?\(?(?P<digits>[0-9A-Za-z]{1,60})\)?(?:\s*\})?\s*(?:_\s*\{?\s*(?:\\text\{\s*)?(?P<base>[0-9]{1,2}|[a-z]{3,11})(?:\s*\})?\s*\}?"
    r"|\s+(?:\\text\{\s*)?(?:in\s)?base[ -](?P<spoken>[0-9]{1,2}|[a-z]{3,11})(?:\s*\})?)"
)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "twelve": 12, "sixteen": 16}  # fmt: skip
_SMALL = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WORDS = {word: value for value, word in enumerate(_SMALL)} | {
    word: 20 + 10 * place for place, word in enumerate(_TENS)
}


@dataclasses.dataclass(frozen=True, slots=True)
class PlainNumber:
    """A number as written.

    >>> read("12.5%")
    PlainNumber(value=Fraction(25, 2), percent=True, rounded=True, digits='')
    """

    value: Fraction
    """Before the percent sign divides it."""
    percent: bool = False
    rounded: bool = False
    """Written with a decimal point or exponent, so it may be inexact."""
    digits: str = ""
    """Digits in an explicit base: 101 of 101₂."""

    @property
    def share(self) -> Fraction:
        """The number itself: 50 % is one half."""
        return self.value / 100 if self.percent else self.value


def read(text: str) -> PlainNumber | None:
    return _read(text) if len(text) <= LONGEST else None


@lru_cache(maxsize=8192)
def _read(text: str) -> PlainNumber | None:
    text = _bare(text)
    if text.isascii() and text.isdigit():
        return PlainNumber(Fraction(int(text)))
    match = _PATTERN.fullmatch(text)
    if match is not None:
        return _number(match)
    return _read_rare(text) if text and text.isascii() else None


def _bare(text: str) -> str:
    text = text.strip()
    if len(text) > 2 and text[0] == "$" == text[-1]:
        text = text[1:-1].strip()
    return text.removesuffix(".").replace("−", "-").replace("\\$", "$")


def _number(match: re.Match[str]) -> PlainNumber | None:
    decimal = match["decimal"]
    if decimal is not None:
        value = _decimal(decimal, match["exponent"])
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


def _decimal(text: str, exponent: str | None = None) -> Fraction:
    return Fraction(f"{text.replace(',', '')}e{exponent or 0}")


def _read_rare(text: str) -> PlainNumber | None:
    if text[0].isalpha():
        value = _in_words(text)
        return PlainNumber(Fraction(value)) if value is not None else _in_base(text)
    if (match := _SCIENTIFIC.fullmatch(text)) is not None:
        return PlainNumber(_signed(match, _decimal(match["mantissa"], match["power"])), rounded=True)
    if _SPACED.fullmatch(text) is not None:
        return PlainNumber(_decimal(re.sub(r"\\,|\\ | ", "", text)), rounded="." in text)
    if (match := _MIXED.fullmatch(text)) is not None:
        return _mixed(match)
    if (match := _SIGNED.fullmatch(text)) is not None:
        return _fraction(match)
    if (match := _REPEATING.fullmatch(text)) is not None:
        return PlainNumber(_signed(match, _repeating(match)))
    return _in_base(text)


def _signed(match: re.Match[str], value: Fraction) -> Fraction:
    return -value if match["sign"] == "-" else value


def _mixed(match: re.Match[str]) -> PlainNumber | None:
    above, below = tuple(match["digits"] or "") or (
        match["above"] or match["numerator"],
        match["below"] or match["denominator"],
    )
    if not 0 < int(above) < int(below):
        return None
    return PlainNumber(_signed(match, int(match["whole"]) + Fraction(int(above), int(below))))


def _fraction(match: re.Match[str]) -> PlainNumber | None:
    above, below = tuple(match["digits"] or "") or (match["above"], match["below"])
    divisor = _decimal(below)
    if divisor == 0:
        return None
    return PlainNumber(_signed(match, _decimal(above) / divisor))


def _repeating(match: re.Match[str]) -> Fraction:
    period = match["over"] or match["round"]
    fixed = match["fixed"]
    start = Fraction(int((match["whole"] or "0") + fixed), 10 ** len(fixed))
    return start + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))


def _in_base(text: str) -> PlainNumber | None:
    match = _BASE.fullmatch(text)
    if match is None:
        return None
    named = match["base"] or match["spoken"]
    base = int(named) if named.isdigit() else _BASES.get(named, 0)
    digits = match["digits"]
    if not 2 <= base <= 36 or not (digits.isupper() or any(map(str.isdigit, digits))):
        return None  # a_{12} is a term of a sequence
    try:
        return PlainNumber(Fraction(int(digits, base)), digits=digits.lstrip("0").upper() or "0")
    except ValueError:
        return None


def _in_words(text: str) -> int | None:
    words = re.split(r"[ -]", text.lower())
    values = [_WORDS.get(word) for word in words]
    if len(values) == 1:
        return values[0]
    if len(values) == 2 and values[0] is not None and values[1] is not None and values[0] >= 20 and 0 < values[1] < 10:
        return values[0] + values[1]
    return None


def close(a: PlainNumber, b: PlainNumber, tolerance: Fraction, *, whole: bool = False) -> bool:
    """Whether two numbers differ by at most ``tolerance`` times the larger, and at least one is rounded.

    Whole numbers are exact, unless ``whole``.
    """
    if a.share == b.share:
        return True
    if not whole and (a.share.denominator == 1 or b.share.denominator == 1 or not (a.rounded or b.rounded)):
        return False
    return abs(a.share - b.share) <= tolerance * max(abs(a.share), abs(b.share))


def written(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    above, below = abs(value.numerator), value.denominator
    return f"{sign}{above}" if below == 1 else rf"{sign}\frac{{{above}}}{{{below}}}"
