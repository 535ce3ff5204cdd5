"""MessagePack with raw arrays: bytes ↔ messages, and nothing else.

A message is a map ``{"kind": str, "schema": int, <field>: <value>, ...}``. A numpy array is one extension value
(type 1)::

    offset  0        1       2         4                  4 + 4·ndim
            ┌────────┬───────┬─────────┬──────────────────┬───────────────────────────┐
            │ dtype  │ ndim  │ 0  0    │ ndim × uint32 LE │ elements, little-endian C │
            └────────┴───────┴─────────┴──────────────────┴───────────────────────────┘

A tuple of many small records of one kind (a group's samples) is written by columns, so that a message has a few large
arrays instead of many small ones: ``{"rows": 2, "text": ["46", "47"], "token_ids": {"lengths": [3, 2], "joined": array}}``.

Decoded arrays are read-only views of the received bytes. Unknown fields are ignored, missing ones take their default,
a newer ``schema`` is refused. There is no pickle. This module knows no message type: classes register themselves
with :func:`message`, nested records with :func:`record`, those written by columns with :func:`columns`.

Every field is checked against its type and its :class:`FieldLimits`, which stand in the type's own declaration as
``Annotated[int, Limits(1, 65_536)]``. What must hold between the fields of a record is its method ``check``.
"""

import dataclasses
import enum
import math
import struct
import threading
import types
import typing
from collections.abc import Callable, Mapping, Sized
from typing import Any, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from shared.errors import MessageError

ARRAY_EXTENSION = 1
_DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name) for name in ("<i4", "<f4", "<i8", "<f8", "|u1", "|b1", "<i2", "<f2")
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_MOST_DIMENSIONS = 8
_MOST_ROWS = 65_536
_MOST_DEPTH = 32
_INVALID = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

T = TypeVar("T")
_Reader = Callable[[Any], Any]
_messages: dict[str, type] = {}
_kinds: dict[type, tuple[str, int]] = {}
_readers: dict[type, dict[str, _Reader]] = {}
_checks: dict[type, Callable[[Any], None] | None] = {}
_columns: dict[type, "ColumnCheck | None"] = {}
_writers: dict[type, dict[str, type | None]] = {}
_local = threading.local()


@dataclasses.dataclass(frozen=True, slots=True)
class FieldLimits:
    """What a field may hold beside its type. The limits of a number in a tuple, an array or a dictionary are those of each."""

    least: float = -math.inf
    most: float = math.inf
    length: int = 1 << 26
    """Maximum number of characters, or of entries of a tuple or dictionary."""
    shape: tuple[int | None, ...] = (None,)
    """Of an array; None: any length."""
    finite: bool = True
    """Whether a float must be finite. An array with limits is finite in any case."""


NO_LIMITS = FieldLimits()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """The arrays of one column, one after another, and how long each is."""

    joined: npt.NDArray[Any]
    lengths: list[int]


ColumnCheck = Callable[[Mapping[str, Joined]], None]
"""Raises ValueError where the array columns of a record do not belong together."""


def record(cls: type[T]) -> type[T]:
    """Register a dataclass that appears inside messages."""
    _readers[cls] = {}
    return cls


def columns(check: ColumnCheck | None = None) -> Callable[[type[T]], type[T]]:
    """Register a dataclass whose tuples inside messages are written by columns, checked together when they are read."""

    def register(cls: type[T]) -> type[T]:
        _columns[cls] = check
        return record(cls)

    return register


def message(kind: str, schema: int) -> Callable[[type[T]], type[T]]:
    """Register a dataclass as the message ``kind``; raise ``schema`` when old readers would misread the new form."""

    def register(cls: type[T]) -> type[T]:
        _messages[kind] = cls
        _kinds[cls] = (kind, schema)
        return record(cls)

    return register


def encode(value: object) -> bytes:
    """Return the bytes of a registered message."""
    kind, schema = _kinds[type(value)]
    return typing.cast(bytes, _packer().pack({"kind": kind, "schema": schema, **_fields(value)}))


def _packer() -> msgpack.Packer:
    """Return this thread's packer: its buffer has grown to the size of our messages and is used again."""
    packer = getattr(_local, "packer", None)
    if packer is None:
        packer = _local.packer = msgpack.Packer(default=_plain)
    return packer


def decode(data: bytes, expected: type[T]) -> T:
    """Return the message in ``data``.

    Raises:
        MessageError: the bytes are no MessagePack, of another kind, of a newer schema, lack a required field, or a field does
            not hold what its type allows.
    """
    try:
        fields = msgpack.unpackb(data, ext_hook=_read_array)
    except (*_INVALID, msgpack.UnpackException) as error:
        raise MessageError(f"expected a MessagePack message, found {len(data)} bytes that are none: {error}") from error
    kind, schema = _kinds[expected]
    written = fields.get("kind") if type(fields) is dict else fields
    if type(written) is not str or written != kind or type(fields) is not dict:
        raise MessageError(f"expected a message of kind {kind!r}, found {_shown(written)}")
    if type(fields.get("schema")) is not int or not 0 <= fields["schema"] <= schema:
        raise MessageError(
            f"expected {kind!r} with schema <= {schema}, found {_shown(fields.get('schema'))}: "
            "update this service to the version that wrote it"
        )
    try:
        return typing.cast(T, _build(expected, fields))
    except _INVALID as error:
        raise MessageError(f"expected the fields of {kind!r} schema {schema}, found others: {error}") from error


def _shown(value: object) -> str:
    """Return a value as an error message may hold it: short, whatever was sent."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return repr(value[:40]) if isinstance(value, (str, bytes)) else type(value).__name__


def _fields(value: object) -> dict[str, Any]:
    """Return the fields of a record as MessagePack writes them; tuples of columnar records as their columns."""
    return {
        name: getattr(value, name) if row is None else _write_columns(row, getattr(value, name))
        for name, row in _writers_of(type(value)).items()
    }


def _writers_of(cls: type) -> dict[str, type | None]:
    if cls not in _writers:
        hints = typing.get_type_hints(cls)
        _writers[cls] = {field.name: _columnar(hints[field.name]) for field in dataclasses.fields(cls)}
    return _writers[cls]


def _columnar(hint: Any) -> type | None:
    arguments = typing.get_args(hint)
    return arguments[0] if typing.get_origin(hint) is tuple and arguments[0] in _columns else None


def _write_columns(row: type, values: tuple[Any, ...]) -> dict[str, Any]:
    written: dict[str, Any] = {"rows": len(values)}
    for name in _readers_of(row) if values else ():
        column = [getattr(value, name) for value in values]
        if isinstance(column[0], np.ndarray):
            written[name] = {"lengths": [len(array) for array in column], "joined": np.concatenate(column)}
        else:
            written[name] = column
    return written


def _read_columns(row: type, written: Mapping[str, Any], most: int) -> tuple[Any, ...]:
    rows = written["rows"]
    if type(rows) is not int or not 0 <= rows <= min(most, _MOST_ROWS):
        raise ValueError(f"expected 0 to {min(most, _MOST_ROWS)} rows, found {_shown(rows)}")
    if rows == 0:
        return ()
    readers = _readers_of(row)
    columns = {name: _read_column(name, reader, written[name]) for name, reader in readers.items() if name in written}
    arrays = {name: column for name, column in columns.items() if isinstance(column, Joined)}
    lengths = {name: len(column.lengths if isinstance(column, Joined) else column) for name, column in columns.items()}
    if any(length != rows for length in lengths.values()):
        raise ValueError(f"expected columns of {rows} rows, found {lengths}")
    if (check := _columns[row]) is not None:
        check(arrays)
    cells = zip(*(_split(c) if isinstance(c, Joined) else c for c in columns.values()), strict=True)
    if len(columns) == len(readers):
        return tuple([row(*values) for values in cells])
    return tuple([row(**dict(zip(columns, values, strict=True))) for values in cells])


def _read_column(name: str, reader: _Reader, column: Any) -> Joined | list[Any]:
    try:
        if isinstance(column, dict):
            return _read_joined(reader, column)
        if not isinstance(column, list):
            raise TypeError(f"expected a column, found {_shown(column)}")
        return [reader(value) for value in column]
    except _INVALID as error:
        raise ValueError(f"{name}: {error}") from error


def _read_joined(reader: _Reader, column: Mapping[str, Any]) -> Joined:
    joined, lengths = reader(column["joined"]), column["lengths"]
    if not isinstance(joined, np.ndarray) or not isinstance(lengths, list):
        raise TypeError("expected an array and the lengths of its parts")
    if not all(type(length) is int and 0 <= length <= len(joined) for length in lengths) or sum(lengths) != len(joined):
        raise ValueError(f"expected lengths that add up to {len(joined)}, found others")
    return Joined(joined, lengths)


def _split(column: Joined) -> list[npt.NDArray[Any]]:
    arrays, start = [], 0
    for length in column.lengths:
        arrays.append(column.joined[start : start + length])
        start += length
    return arrays


def _plain(value: object) -> Any:
    if isinstance(value, np.ndarray):
        return _write_array(value)
    if type(value) in _readers:
        return _fields(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot write {type(value).__name__} into a message")


def _write_array(array: npt.NDArray[Any]) -> msgpack.ExtType:
    little = array.dtype.newbyteorder("<")
    if little not in _DTYPE_CODES:
        raise TypeError(f"cannot write an array of {array.dtype} into a message")
    header = struct.pack(f"<BBxx{array.ndim}I", _DTYPE_CODES[little], array.ndim, *array.shape)
    elements = np.ascontiguousarray(array, dtype=little)
    return msgpack.ExtType(ARRAY_EXTENSION, b"".join((header, elements.data if elements.size else b"")))


def _read_array(code: int, data: bytes) -> npt.NDArray[Any]:
    if code != ARRAY_EXTENSION:
        raise ValueError(f"unknown extension type {code}")
    try:
        dtype, ndim = data[0], data[1]
        if ndim > _MOST_DIMENSIONS:
            raise ValueError(f"expected an array of at most {_MOST_DIMENSIONS} dimensions, found {ndim}")
        shape = struct.unpack_from(f"<{ndim}I", data, 4)
        return np.frombuffer(data, dtype=_DTYPES[dtype], offset=4 + 4 * ndim).reshape(shape)
    except (IndexError, struct.error) as error:
        raise ValueError(f"broken array: {error}") from error


def _build(cls: type, fields: Any) -> Any:
    if type(fields) is not dict:
        raise TypeError(f"expected the fields of a {cls.__name__}, found {_shown(fields)}")
    values, name = {}, ""
    try:
        for name, reader in _readers_of(cls).items():
            if name in fields:
                values[name] = reader(fields[name])
    except _INVALID as error:
        raise ValueError(f"{name}: {error}") from error
    built = cls(**values)
    if (check := _checks[cls]) is not None:
        check(built)
    return built


def _readers_of(cls: type) -> dict[str, _Reader]:
    readers = _readers[cls]
    if not readers:
        hints = typing.get_type_hints(cls, include_extras=True)
        readers.update({field.name: _reader(hints[field.name], NO_LIMITS) for field in dataclasses.fields(cls)})
        _checks[cls] = getattr(cls, "check", None)
    return readers


def _reader(hint: Any, limits: FieldLimits) -> _Reader:
    """Return how to check a decoded value and turn it into ``hint``."""
    if typing.get_origin(hint) is typing.Annotated:
        return _reader(hint.__origin__, next(found for found in hint.__metadata__ if isinstance(found, FieldLimits)))
    if isinstance(hint, typing.NewType):
        return _reader(hint.__supertype__, limits)
    if (row := _columnar(hint)) is not None:
        return lambda written: _read_columns(row, written, limits.length)
    if typing.get_origin(hint) is not None or isinstance(hint, types.UnionType):
        return _composite_reader(hint, limits)
    if hint in _readers:
        return lambda value: _build(hint, value)
    if issubclass(hint, enum.Enum):
        return _enum_reader(hint)
    return {int: _int_reader, float: _float_reader, str: _text_reader}[hint](limits)


def _composite_reader(hint: Any, limits: FieldLimits) -> _Reader:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        read = _reader(inner, limits)
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        return _tuple_reader(_reader(arguments[0], limits), limits)
    if origin is dict:
        plain = isinstance(arguments[1], types.UnionType) or typing.get_origin(arguments[1]) is typing.Union
        return _dict_reader(_read_json if plain else _reader(arguments[1], limits), limits)
    assert origin is np.ndarray, hint
    return _array_reader(np.dtype(typing.get_args(arguments[1])[0]), limits)


def _int_reader(limits: FieldLimits) -> _Reader:
    least, most = limits.least, limits.most

    def read(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"expected a whole number from {least:g} to {most:g}, found {_shown(value)}")
        return value

    return read


def _float_reader(limits: FieldLimits) -> _Reader:
    least, most, finite, isfinite = limits.least, limits.most, limits.finite, math.isfinite
    bounded = not (math.isinf(least) and math.isinf(most))

    def read(value: Any) -> float:
        if type(value) is float and not bounded and (not finite or isfinite(value)):
            return value
        if type(value) not in (float, int) or (finite and not (least <= value <= most and math.isfinite(value))):
            raise ValueError(f"expected a finite number from {least:g} to {most:g}, found {_shown(value)}")
        return float(value)

    return read


def _text_reader(limits: FieldLimits) -> _Reader:
    most = limits.length

    def read(value: Any) -> str:
        if type(value) is not str or len(value) > most:
            length = f"a text of {len(value)}" if isinstance(value, str) else _shown(value)
            raise ValueError(f"expected a text of at most {most} characters, found {length}")
        return value

    return read


def _enum_reader(hint: type[enum.Enum]) -> _Reader:
    members = {member.value: member for member in hint}

    def read(value: Any) -> enum.Enum:
        if type(value) is not str or (member := members.get(value)) is None:
            raise ValueError(f"expected one of {', '.join(members)}, found {_shown(value)}")
        return member

    return read


def _array_reader(dtype: np.dtype[Any], limits: FieldLimits) -> _Reader:
    least, most, shape = limits.least, limits.most, limits.shape
    bounded = not (math.isinf(least) and math.isinf(most))

    def read(value: Any) -> npt.NDArray[Any]:
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != len(shape):
            found = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else _shown(value)
            raise TypeError(f"expected an array of {dtype} with {len(shape)} dimensions, found {found}")
        if any(expected not in (None, length) for expected, length in zip(shape, value.shape, strict=True)):
            raise ValueError(f"expected an array of shape {shape}, found {value.shape}")
        if bounded and value.size and not _within(value, least, most):
            raise ValueError(f"expected numbers from {least:g} to {most:g}, found {value.min():g} to {value.max():g}")
        return value

    return read


def _within(value: npt.NDArray[Any], least: float, most: float) -> bool:
    if value.dtype == np.int32 and least == 0:
        return bool(value.view(np.uint32).max() <= most)  # a negative number is a large one without its sign
    return bool(least <= value.min() and value.max() <= most)  # NaN is in no order


def _tuple_reader(inner: _Reader, limits: FieldLimits) -> _Reader:
    most = limits.length

    def read(values: Any) -> tuple[Any, ...]:
        return tuple([inner(value) for value in _sized(values, list, most)])

    return read


def _dict_reader(inner: _Reader, limits: FieldLimits) -> _Reader:
    name, most = _text_reader(NO_LIMITS), limits.length

    def read(values: Any) -> dict[str, Any]:
        return {name(key): inner(value) for key, value in _sized(values, dict, most).items()}

    return read


def _sized(values: Any, kind: type[Sized], most: int) -> Any:
    if type(values) is not kind:
        raise TypeError(f"expected a {kind.__name__}, found {_shown(values)}")
    if len(values) > most:
        raise ValueError(f"expected a {kind.__name__} of at most {most} entries, found {len(values)}")
    return values


def _read_json(value: Any, depth: int = 0) -> Any:
    """Return a value of a dataset's row: what JSON can say, nested at most ``_MOST_DEPTH`` deep."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth == _MOST_DEPTH:
        raise ValueError(f"expected values nested at most {_MOST_DEPTH} deep, found deeper ones")
    if type(value) is list:
        return [_read_json(inner, depth + 1) for inner in value]
    if type(value) is dict and all(type(name) is str for name in value):
        return {name: _read_json(inner, depth + 1) for name, inner in value.items()}
    raise TypeError(f"expected what JSON can say, found {_shown(value)}")
