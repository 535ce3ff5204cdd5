"""Convert objects to tagged JSON and back. Standard library only, as it runs inside too.

::

    (1, [2])  ──▶  {"tuple": [1, [2]]}      {3}  ──▶  {"set": [3]}      {4: "x"}  ──▶  {"dict": [[4, "x"]]}
    Counter("aa")  ──▶  {"Counter": [["a", 2]]}      map(…)  ──▶  {"iterator": […]}

Subclasses become their base: namedtuple a tuple, IntEnum an int. Rebuilt objects have builtin and library types only,
so a forged text is just data.
"""

import collections
import datetime
import decimal
import fractions
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

DEEPEST = 100
_LONGEST_ITERATOR = 100_000
_LONG_INT = 1 << 10_000
"""Larger ones may have more digits than the service reads (``sys.set_int_max_str_digits``)."""
_SCALARS = frozenset((bool, float, str, type(None)))
_AS_JSON = frozenset(("tuple", "deque", "range", "iterator", "dict_keys", "dict_values"))
_EXPECTED = (
    "expected None, bool, int, float, str, list, tuple, dict or another type of the standard library that holds data"
)


class NotPlain(Exception):
    """A result that is not data."""


def tagged(value: Any, where: str, depth: int = 0) -> Any:
    """Return ``value`` as tagged JSON. Raises NotPlain: not data, or too much; names what ``where`` returned."""
    if type(value) in _SCALARS:
        return value
    if depth > DEEPEST:
        raise NotPlain(f"{where} returned data of more than {DEEPEST} levels")
    if isinstance(value, list):
        return _items(list.__iter__(value), where, depth)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if abs(number) < _LONG_INT else {"int": hex(number)}
    for kind, tag, written in _WRITTEN:
        if isinstance(value, kind):
            return written(value) if tag is None else {tag: _items(written(value), where, depth)}
    if isinstance(value, Iterator):
        return {"iterator": _items(_bounded(value, where), where, depth)}
    if "numpy" in sys.modules and isinstance(value, (sys.modules["numpy"].ndarray, sys.modules["numpy"].generic)):
        return tagged(value.tolist(), where, depth + 1)
    raise NotPlain(f"{where} returned {type(value).__name__}, {_EXPECTED}")


def _items(items: Any, where: str, depth: int) -> list[Any]:
    return [tagged(item, where, depth + 1) for item in items]


def _bounded(iterator: Iterator[Any], where: str) -> list[Any]:
    items = list(itertools.islice(iterator, _LONGEST_ITERATOR + 1))
    if len(items) > _LONGEST_ITERATOR:
        raise NotPlain(f"{where} returned an iterator of more than {_LONGEST_ITERATOR} items")
    return items


def _pairs(value: dict[Any, Any]) -> list[list[Any]]:
    return [list(pair) for pair in dict.items(value)]


_WRITTEN: tuple[tuple[type, str | None, Callable[[Any], Any]], ...] = (
    (tuple, "tuple", tuple.__iter__),
    (collections.Counter, "Counter", _pairs),
    (
        collections.OrderedDict,
        "OrderedDict",
        lambda value: list(map(list, collections.OrderedDict.items(value))),
    ),
    (dict, "dict", _pairs),
    (str, None, str.__str__),
    (float, None, float.__float__),
    (set, "set", set.__iter__),
    (frozenset, "frozenset", frozenset.__iter__),
    (collections.deque, "deque", collections.deque.__iter__),
    (type({}.keys()), "dict_keys", iter),
    (type({}.values()), "dict_values", iter),
    (type({}.items()), "dict_items", lambda value: list(map(list, value))),
    (range, "range", lambda value: [value.start, value.stop, value.step]),
    (decimal.Decimal, None, lambda value: {"Decimal": str(value)}),
    (fractions.Fraction, None, lambda value: {"Fraction": [hex(value.numerator), hex(value.denominator)]}),
    (bytes, None, lambda value: {"bytes": bytes(value).hex()}),
    (bytearray, None, lambda value: {"bytearray": bytes(value).hex()}),
    (complex, None, lambda value: {"complex": [value.real, value.imag]}),
    (datetime.datetime, None, lambda value: {"datetime": value.isoformat()}),
    (datetime.date, None, lambda value: {"date": value.isoformat()}),
    (datetime.time, None, lambda value: {"time": value.isoformat()}),
    (datetime.timedelta, None, lambda value: {"timedelta": [value.days, value.seconds, value.microseconds]}),
)
"""By type, most specific first."""


def as_json(value: Any, where: str) -> Any:
    """Return ``value`` as untagged JSON with sequences as lists. Raises NotPlain."""
    return _untagged(tagged(value, where), where)


def _untagged(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_untagged(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "int":
        return int(content, 16)
    if tag == "range":
        return list(_bounded(iter(range(*content)), where))
    if tag in _AS_JSON:
        return [_untagged(item, where) for item in content]
    if tag in ("dict", "Counter", "OrderedDict"):
        pairs = {_key(key, where): _untagged(item, where) for key, item in content}
        if len(pairs) == len(content):
            return pairs
    raise NotPlain(f"{where} returned {tag}, expected None, bool, int, float, str, list, tuple or dict")


def _key(key: Any, where: str) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, (list, dict)):
        raise NotPlain(f"{where} returned a dict with a key that holds several values, expected str or a number")
    return json.dumps(key)


SIMPLE: Mapping[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "int": lambda text: int(text, 16),
}
ALL: Mapping[str, Callable[[Any], Any]] = {
    **SIMPLE,
    "Counter": lambda pairs: collections.Counter(dict(pairs)),
    "OrderedDict": collections.OrderedDict,
    "deque": collections.deque,
    "dict_keys": lambda items: dict.fromkeys(items).keys(),
    "dict_values": lambda items: dict(enumerate(items)).values(),
    "dict_items": lambda pairs: dict(pairs).items(),
    "range": lambda bounds: range(*bounds),
    "iterator": iter,
    "Decimal": decimal.Decimal,
    "Fraction": lambda parts: fractions.Fraction(int(parts[0], 16), int(parts[1], 16)),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda parts: complex(*parts),
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda parts: datetime.timedelta(*parts),
}


def rebuilt(value: Any, makers: Mapping[str, Callable[[Any], Any]] = ALL, depth: int = 0) -> Any:
    """Return the objects of tagged JSON. Raises LookupError: a tag that ``makers`` lacks; ValueError, TypeError,
    ArithmeticError: content that does not fit its tag, or too deep.
    """
    if not isinstance(value, (list, dict)):
        return value
    if depth > 3 * DEEPEST:  # a level of dicts is three of JSON
        raise ValueError(f"more than {DEEPEST} levels")
    if isinstance(value, list):
        return [rebuilt(item, makers, depth + 1) for item in value]
    if len(value) != 1:
        raise ValueError("expected a single tag")
    ((tag, content),) = value.items()
    return makers[tag](rebuilt(content, makers, depth + 1))
