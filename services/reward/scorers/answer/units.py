"""Units and currencies of an answer; an unknown word is a unit of its own without conversions."""

import dataclasses
import re
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

Dimensions: TypeAlias = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    factor: Fraction
    dimensions: Dimensions


DEGREE = Unit(Fraction(1), (("degree", 1),))
_TABLE = {
    "m": "1 m metre meter",
    "km": "1000 m kilometre kilometer", "cm": "1/100 m centimetre centimeter", "mm": "1/1000 m millimetre millimeter",
    "dm": "1/10 m decimetre decimeter", "in": "254/10000 m inch inche", "ft": "3048/10000 m foot feet", "yd": "9144/10000 m yard",
    "mi": "1609344/1000 m mile",
    "g": "1 g gram gramme", "kg": "1000 g kilogram kilogramme", "mg": "1/1000 g milligram", "lb": "45359237/100000 g pound lbs",
    "oz": "45359237/1600000 g ounce",
    "s": "1 s second sec", "min": "60 s minute", "h": "3600 s hour hr hrs", "day": "86400 s day", "week": "604800 s week",
    "month": "1 month month", "yr": "12 month year", "ms": "1/1000 s millisecond",
    "L": "1/1000 m3 litre liter l", "mL": "1/1000000 m3 millilitre milliliter ml", "acre": "1 acre acre", "ha": "10000 m2 hectare",
    "dollar": "1 dollar usd", "cent": "1/100 dollar cent", "euro": "1 euro eur", "gbp": "1 gbp", "rupee": "1 rupee",
    "yen": "1 yen", "N": "1 N newton", "J": "1 J joule", "kJ": "1000 J kilojoule", "W": "1 W watt", "kW": "1000 W kilowatt", "V": "1 V volt",
    "A": "1 A ampere amp", "Hz": "1 Hz hertz", "Pa": "1 Pa pascal", "K": "1 K kelvin", "mol": "1 mol mole", "rad": "1 rad radian",
    "deg": "1 degree degree",
}  # fmt: skip
_CURRENCIES = {
    r"\$": "dollar",
    "$": "dollar",
    "€": "euro",
    r"\euro": "euro",
    "£": "gbp",
    r"\pounds": "gbp",
    "¥": "yen",
    "₹": "rupee",
}
_PLACEHOLDERS = {"unit", "square unit", "cubic unit", "sq unit", "cu unit", "units squared", "units cubed"}
_PLURALS = {"people", "persons", "children", "men", "women", "mice", "geese", "teeth", "fish", "sheep", "deer", "dice"}
_NO_NOUN = re.compile(
    r"zeroe?|one|two|three|four|five|sixe?|seven|eight|nine|ten|eleven|twelve|\w+teen|(?:twen|thir|for|fif|six|seven|eigh|nine)t(?:y|ie)"
    r"|half|halve|quarter|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|\w*(?:teen|tie|hundred|thousand|illion)th)"
    r"|dozen|hundred|thousand|myriad|\w*illion|lakh|crore|googol\w*|minus?|plus?"
    r"|double|triple|quadruple|square|cube|power|reciprocal|negative|inverse|opposite|root|log|logarithm|factorial|other|exception|wrong"
)
"""In the singular: words in the plural that change the number, or take it back."""
_CURRENCY = re.compile(r"(?P<sign>[-+]?)\s*(?P<currency>\\?\$|€|£|¥|₹|\\euro|\\pounds)\s*(?=[-+]?[0-9.\\(])")
_RATE = re.compile(r"(?<=[0-9}])(?:\s+per\s+|\s*/\s*)[A-Za-z]{1,20}$")
_AFTER_CURRENCY = re.compile(r"\s*(?P<currency>\\\$|\$|€|£|¥|₹)$")
_DEGREES = re.compile(r"\s*\^\\circ\s*(?P<scale>(?:\\text\{\s*)?[CF](?:\s*\})?)?$")
_ATOM = r"(?:\\text\s*\{\s*[A-Za-z][A-Za-z ./^0-9-]{0,40}\s*\}|[A-Za-z]+)(?:\^\{?-?[1-9]\}?)?"
_TRAILING = re.compile(rf"(?P<space>\s*(?:\\,|\\ )?\s*)(?P<unit>{_ATOM}(?:\s*(?:/|\\cdot|\s)\s*{_ATOM}){{0,3}})$")
_NAME = re.compile(r"^(?:(?P<kind>square|cubic|sq\.?|cu\.?)\s+)?(?P<name>[A-Za-z][A-Za-z -]*?)(?:\s+(?P<power>squared|cubed)|\s*\^\{?(?P<exponent>-?[1-9])\}?|(?P<digit>[23]))?$")  # fmt: skip
_NO_UNITS = re.compile(r"\b(?:or|and|is|are|not|but|to|the|of|base|where|when|for|if)\b")
_VALUE_END = re.compile(r"(?:[0-9}).!]|\\pi|[0-9)}][a-z])$")
_LONGEST = 300


def split_unit(text: str) -> tuple[str, Unit | None]:
    r"""Return ``text`` without its unit, and the unit.

    >>> split_unit(r"5\text{ cm}^2")[0], split_unit("x")[1]
    ('5', None)
    """
    if len(text) > _LONGEST or not text:
        return text, None
    if (match := _CURRENCY.match(text)) is not None:
        return _priced(match["sign"] + text[match.end() :], _CURRENCIES[match["currency"]])
    if (match := _AFTER_CURRENCY.search(text)) is not None and _VALUE_END.search(text[: match.start()]):
        return text[: match.start()], _named(_CURRENCIES[match["currency"]])
    if (match := _DEGREES.search(text)) is not None:
        scale = re.sub(r"\\text|[{}\s]", "", match["scale"] or "")
        return text[: match.start()], Unit(Fraction(1), ((f"degree {scale}", 1),)) if scale else DEGREE
    if not (text[-1].isalpha() or text[-1] in "}0123456789."):
        return text, None
    return _trailing(text)


def _priced(text: str, currency: str) -> tuple[str, Unit | None]:
    """Split ``$18 per day``, given without its sign."""
    rate = _RATE.search(text)
    return (text, _named(currency)) if rate is None else (text[: rate.start()], read_unit(f"{currency}{rate[0]}"))


def _trailing(text: str) -> tuple[str, Unit | None]:
    match = _TRAILING.search(text)
    if match is None or _NO_UNITS.search(match["unit"]):
        return text, None
    value, named = text[: match.start()].rstrip(), match["unit"]
    if not value or not _VALUE_END.search(value):
        return text, None
    letters = re.sub(r"[^A-Za-z]", "", named.replace(r"\text", ""))
    if r"\text" not in named and (not match["space"] or len(letters) == 1) and not _known(named, match["space"]):
        return text, None
    unit = read_unit(named)
    return (text, None) if unit is None else (value, unit)


def _known(named: str, space: str) -> bool:
    """Whether a letter or word after a number is a unit: ``5 m`` and ``5cm``, not ``5m`` or ``5x``."""
    names = [re.sub(r"\^.*", "", name) for name in re.split(r"[/\s]+", named)]
    return all(_atom(name) is not None and (bool(space) or len(name) > 1) for name in names if name)


@lru_cache(maxsize=2048)
def read_unit(named: str) -> Unit | None:
    r"""Parse a unit: ``cm^2``, ``m/s``, ``\text{square feet}``, ``apples``."""
    named = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", named).replace(r"\cdot", " * ").replace(r"\ ", " ").strip(" .")
    named = re.sub(r"\s+", " ", named)
    if _singular(named.lower()) in _PLACEHOLDERS or re.fullmatch(r"(?i)units?\^\{?[23]\}?", named):
        return Unit(Fraction(1), ())
    if named.lower() in ("miles per hour", "mph"):
        named = "mi/h"
    if named.lower() in ("kmh", "kph"):
        named = "km/h"
    factor, dimensions = Fraction(1), dict[str, int]()
    for place, part in enumerate(re.split(r"\s*/\s*|\s+per\s+", named)):
        for name in part.split("*"):
            atom = _power(name.strip())
            if atom is None or not (place or _is_unit(name.strip())):
                return None
            factor = factor / atom.factor if place else factor * atom.factor
            for dimension, exponent in atom.dimensions:
                dimensions[dimension] = dimensions.get(dimension, 0) + (-exponent if place else exponent)
    return Unit(factor, tuple(sorted((name, power) for name, power in dimensions.items() if power)))


def _is_unit(name: str) -> bool:
    """Whether ``name`` is in the table, or a noun in the plural: not ``more``, ``negative`` or ``factorial``."""
    match = _NAME.match(name)
    named = match["name"] if match else name
    words = named.lower().split(" ")
    if _atom(named) is not None:
        return True
    is_plural = words[-1] in _PLURALS or _singular(words[-1]) != words[-1]
    return is_plural and not any(_NO_NOUN.fullmatch(_singular(word)) for word in words)


def _power(name: str) -> Unit | None:
    match = _NAME.match(name)
    if match is None:
        return None
    exponent = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}.get((match["kind"] or "").rstrip("."), 1)
    exponent = {"squared": 2, "cubed": 3}.get(match["power"] or "", exponent)
    exponent = int(match["exponent"] or match["digit"] or exponent)
    unit = _named(match["name"])
    return Unit(unit.factor**exponent, tuple((dimension, power * exponent) for dimension, power in unit.dimensions))


def _named(name: str) -> Unit:
    return _atom(name) or Unit(Fraction(1), ((_singular(name.lower()), 1),))


def _atom(name: str) -> Unit | None:
    return (
        _UNITS.get(name) or (_UNITS.get(_singular(name.lower())) if len(name) > 2 else None) or _UNITS.get(name.lower())
    )


def _singular(name: str) -> str:
    return name[:-1] if len(name) > 3 and name.endswith("s") and not name.endswith("ss") else name


def _tabled() -> dict[str, Unit]:
    units = dict[str, Unit]()
    for symbol, line in _TABLE.items():
        factor, base, *names = line.split()
        power = int(base[-1]) if base[-1].isdigit() else 1
        for name in (symbol, *names):
            units[name] = Unit(Fraction(factor), ((base.rstrip("23"), power),))
    return units


_UNITS = _tabled()
