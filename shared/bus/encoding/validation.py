"""Validate decoded values.

A :class:`Reader` checks a value and returns it as its field holds it. Many values are checked in bulk, at C speed,
and one by one only if that fails, to name the refused value.
"""

import dataclasses
import enum
import math
import sys
from collections.abc import Callable, Sized
from typing import Any

import numpy as np
import numpy.typing as npt

INVALID = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What reading hostile values may raise."""
_MOST_DEPTH = 32
_JSON_SCALARS = frozenset((type(None), bool, int, float, str))


@dataclasses.dataclass(frozen=True, slots=True)
class FieldLimits:
    """Limits of a field; for a container, of each number in it."""

    least: float = -math.inf
    most: float = math.inf
    length: int = 1 << 26
    """Maximum characters or entries."""
    shape: tuple[int | None, ...] = (None,)
    """Of an array; None: any length."""
    finite: bool = True
    """Always true of arrays with limits."""

    @property
    def bounded(self) -> bool:
        return not (math.isinf(self.least) and math.isinf(self.most))


NO_LIMITS = FieldLimits()

Read = Callable[[Any], Any]
ReadAll = Callable[[list[Any]], list[Any]]


class Reader:
    """Checks a decoded value and returns what its field holds.

    Args:
        read: reads a value.
        read_all: reads many values; default: one by one.
        test: expression of ``{v}``, true only of values that ``read`` returns unchanged; "": none.
    """

    __slots__ = ("read", "read_all", "test")

    def __init__(self, read: Read, read_all: ReadAll | None = None, test: str = "") -> None:
        self.read = read
        self.read_all: ReadAll = read_all or (lambda values: list(map(read, values)))
        self.test = test


def shown(value: object) -> str:
    """Shorten a value for an error message."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return repr(value[:40]) if isinstance(value, (str, bytes)) else type(value).__name__


def optional(inner: Reader) -> Reader:
    read = inner.read
    test = f"({{v}} is None or {inner.test})" if inner.test else ""
    return Reader(lambda value: None if value is None else read(value), test=test)


def int_reader(limits: FieldLimits) -> Reader:
    least, most = limits.least, limits.most

    def read(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"expected a whole number from {least:g} to {most:g}, found {shown(value)}")
        return value

    def read_all(values: list[Any]) -> list[Any]:
        if values and set(map(type, values)) == {int} and least <= min(values) and max(values) <= most:
            return values
        return list(map(read, values))

    return Reader(read, read_all, f"(type({{v}}) is int{_bounds(limits.least, limits.most)})")


def float_reader(limits: FieldLimits) -> Reader:
    """Return the reader of a float; ints are accepted."""
    least, most, finite, isfinite = limits.least, limits.most, limits.finite, math.isfinite

    def read(value: Any) -> float:
        if type(value) not in (float, int) or (finite and not (least <= value <= most and isfinite(value))):
            raise ValueError(f"expected a finite number from {least:g} to {most:g}, found {shown(value)}")
        return float(value)

    def read_all(values: list[Any]) -> list[Any]:
        if set(map(type, values)) == {float} and (
            not finite or (all(map(isfinite, values)) and least <= min(values) and max(values) <= most)
        ):
            return values
        return list(map(read, values))

    largest = sys.float_info.max
    bounds = _bounds(max(least, -largest), min(most, largest)) if finite else ""
    return Reader(read, read_all, f"(type({{v}}) is float{bounds})")


def _bounds(least: float, most: float) -> str:
    low, high = "" if math.isinf(least) else f"{least!r} <= ", "" if math.isinf(most) else f" <= {most!r}"
    return f" and {low}{{v}}{high}" if low or high else ""


def text_reader(limits: FieldLimits) -> Reader:
    most = limits.length

    def read(value: Any) -> str:
        if type(value) is not str or len(value) > most:
            length = f"a text of {len(value)}" if isinstance(value, str) else shown(value)
            raise ValueError(f"expected a text of at most {most} characters, found {length}")
        return value

    def read_all(values: list[Any]) -> list[Any]:
        if values and set(map(type, values)) == {str} and max(map(len, values)) <= most:
            return values
        return list(map(read, values))

    return Reader(read, read_all, f"(type({{v}}) is str and len({{v}}) <= {most})")


def bytes_reader(limits: FieldLimits) -> Reader:
    most = limits.length

    def read(value: Any) -> bytes:
        if type(value) is not bytes or len(value) > most:
            raise ValueError(f"expected at most {most} bytes, found {shown(value)}")
        return value

    return Reader(read)


def enum_reader(hint: type[enum.Enum]) -> Reader:
    members = {member.value: member for member in hint}

    def read(value: Any) -> enum.Enum:
        if type(value) is not str or (member := members.get(value)) is None:
            raise ValueError(f"expected one of {', '.join(members)}, found {shown(value)}")
        return member

    def read_all(values: list[Any]) -> list[Any]:
        try:
            return list(map(members.__getitem__, values))
        except (KeyError, TypeError):
            return list(map(read, values))

    return Reader(read, read_all)


def array_reader(dtype: np.dtype[Any], limits: FieldLimits) -> Reader:
    least, most, shape, bounded = limits.least, limits.most, limits.shape, limits.bounded
    lengths = [(axis, length) for axis, length in enumerate(shape) if length is not None]
    within = _within(dtype, least, most)

    def read(value: Any) -> npt.NDArray[Any]:
        if type(value) is not np.ndarray or value.dtype != dtype or value.ndim != len(shape):
            sent = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else shown(value)
            raise TypeError(f"expected an array of {dtype} with {len(shape)} dimensions, found {sent}")
        for axis, length in lengths:
            if value.shape[axis] != length:
                raise ValueError(f"expected an array of shape {shape}, found {value.shape}")
        if bounded and value.size and not within(value):
            raise ValueError(f"expected numbers from {least:g} to {most:g}, found {value.min():g} to {value.max():g}")
        return value

    return Reader(read)


def _within(dtype: np.dtype[Any], least: float, most: float) -> Callable[[npt.NDArray[Any]], bool]:
    """Return a test of an array's bounds, rounded to its type. NaN fails."""
    smallest, largest = np.minimum.reduce, np.maximum.reduce
    if dtype == np.int32 and least == 0:  # as unsigned, a negative number is large: one pass
        return lambda value: largest(value.view(np.uint32), None).item() <= most
    if dtype.kind == "f":
        least, most = float(dtype.type(least)), float(dtype.type(most))
    return lambda value: least <= smallest(value, None).item() and largest(value, None).item() <= most


def tuple_reader(inner: Reader, limits: FieldLimits) -> Reader:
    most, read_all = limits.length, inner.read_all

    def read(values: Any) -> tuple[Any, ...]:
        _require_size(values, list, most)
        return tuple(read_all(values)) if values else ()

    return Reader(read)


def dict_reader(inner: Reader, limits: FieldLimits) -> Reader:
    names, held, most = text_reader(NO_LIMITS).read_all, inner.read_all, limits.length

    def read(values: Any) -> dict[str, Any]:
        _require_size(values, dict, most)
        if not values:
            return {}
        names(list(values))
        written = list(values.values())
        checked = held(written)
        return dict(values) if checked is written else dict(zip(values, checked, strict=True))

    return Reader(read)


def _require_size(values: Any, kind: type[Sized], most: int) -> None:
    if type(values) is not kind:
        raise TypeError(f"expected a {kind.__name__}, found {shown(values)}")
    if len(values) > most:
        raise ValueError(f"expected a {kind.__name__} of at most {most} entries, found {len(values)}")


def json_reader() -> Reader:
    """Return the reader of any JSON value nested at most 32 deep."""

    def read_all(values: list[Any]) -> list[Any]:
        return values if _JSON_SCALARS.issuperset(map(type, values)) else [_read_json(value) for value in values]

    return Reader(_read_json, read_all)


def _read_json(value: Any, depth: int = 0) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth == _MOST_DEPTH:
        raise ValueError(f"expected values nested at most {_MOST_DEPTH} deep, found deeper ones")
    if type(value) is list:
        return [_read_json(inner, depth + 1) for inner in value]
    if type(value) is dict and all(type(name) is str for name in value):
        return {name: _read_json(inner, depth + 1) for name, inner in value.items()}
    raise TypeError(f"expected what JSON can say, found {shown(value)}")
