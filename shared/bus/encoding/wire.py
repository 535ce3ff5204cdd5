"""Encode and decode messages as MessagePack with raw arrays.

A message is a map ``{"kind": str, "schema": int, <field>: <value>, ...}``; a numpy array is one extension value (type
1)::

    offset  0        1       2         4                  4 + 4·ndim
            ┌────────┬───────┬─────────┬──────────────────┬───────────────────────────┐
            │ dtype  │ ndim  │ 0  0    │ ndim × uint32 LE │ elements, little-endian C │
            └────────┴───────┴─────────┴──────────────────┴───────────────────────────┘

Tuples of small records are written by ``columns``. Decoded arrays are read-only views. There is no pickle.

Fields are checked against types and :class:`FieldLimits`; ``check`` methods check across fields.
"""

import dataclasses
import enum
import functools
import struct
import threading
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from penstock.shared.bus.encoding.columns import ColumnCheck, columns_reader, write_columns
from penstock.shared.bus.encoding.record_reader import record_reader
from penstock.shared.bus.encoding.validation import (
    INVALID,
    NO_LIMITS,
    FieldLimits,
    Reader,
    array_reader,
    bytes_reader,
    dict_reader,
    enum_reader,
    float_reader,
    int_reader,
    json_reader,
    optional,
    shown,
    text_reader,
    tuple_reader,
)
from penstock.shared.errors import MessageError

ARRAY_EXTENSION = 1
_DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name) for name in ("<i4", "<f4", "<i8", "<f8", "|u1", "|b1", "<i2", "<f2")
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_MOST_DIMENSIONS = 8
_SHAPES = tuple(struct.Struct(f"<{dimensions}I") for dimensions in range(_MOST_DIMENSIONS + 1))

T = TypeVar("T")
Write: typing.TypeAlias = Callable[[Any], dict[str, Any]]
_messages: dict[str, type] = {}
_kinds: dict[type, tuple[str, int]] = {}
_registered: set[type] = set()
_column_checks: dict[type, ColumnCheck | None] = {}
_late: dict[type, tuple[str, ...]] = {}
_records: dict[type, Reader] = {}
_writers: dict[type, Write] = {}
_joins: dict[type, Callable[[list[Any]], dict[str, Any]]] = {}
_local = threading.local()


def record(cls: type[T]) -> type[T]:
    """Register a dataclass that appears inside messages."""
    _registered.add(cls)
    return cls


def columns(check: ColumnCheck | None = None, late: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]:
    """Register a dataclass written by columns and checked together; those of ``late`` (last) only if they hold something."""

    def register(cls: type[T]) -> type[T]:
        _column_checks[cls] = check
        _late[cls] = late
        return record(cls)

    return register


def message(kind: str, schema: int, late: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]:
    """Register the message ``kind``; raise ``schema`` if old readers would misread the new form.

    Fields of ``late`` (text, counts) are written only if they hold something; a value whose ``is_plain`` is true, as schema 1.
    """

    def register(cls: type[T]) -> type[T]:
        _messages[kind] = cls
        _kinds[cls] = (kind, schema)
        _late[cls] = late
        return record(cls)

    return register


def join_by(cls: type, join: Callable[[list[Any]], dict[str, Any]]) -> None:
    """Read an array of pieces, where ``cls`` is expected, as the fields that ``join`` returns."""
    _joins[cls] = join


def encode(value: object) -> bytes:
    kind, schema = _kinds[type(value)]
    if getattr(value, "is_plain", False):
        schema = 1
    return typing.cast(bytes, _packer().pack({"kind": kind, "schema": schema, **_writer(type(value))(value)}))


def _packer() -> msgpack.Packer:
    """Return this thread's packer, to reuse its buffer."""
    packer = getattr(_local, "packer", None)
    if packer is None:
        packer = _local.packer = msgpack.Packer(default=_plain)
    return packer


def decode(data: bytes | memoryview, expected: type[T]) -> T:
    """Decode a message.

    Raises:
        MessageError: not MessagePack, another kind, a newer schema, a missing field, or a field of the wrong type.
    """
    fields = _unpacked(data)
    try:
        if type(fields) is list and expected in _joins:
            fields = _joins[expected](fields)
        else:
            _check_kind(fields, expected)
        return typing.cast(T, _record(expected).read(fields))
    except INVALID as error:
        kind, schema = _kinds[expected]
        raise MessageError(f"expected the fields of {kind!r} schema {schema}, found other ones: {error}") from error


def unpack(data: bytes, expected: type) -> dict[str, Any]:
    """Return a message's fields, which are not checked.

    Raises:
        MessageError: not MessagePack, another kind, or a newer schema.
    """
    fields = _unpacked(data)
    _check_kind(fields, expected)
    return typing.cast("dict[str, Any]", fields)


def _unpacked(data: bytes | memoryview) -> Any:
    try:
        return msgpack.unpackb(data, ext_hook=_read_array)
    except (*INVALID, msgpack.UnpackException) as error:
        raise MessageError(f"expected a MessagePack message, found {len(data)} bytes that are none: {error}") from error


def _check_kind(fields: Any, expected: type) -> None:
    kind, schema = _kinds[expected]
    written = fields.get("kind") if type(fields) is dict else fields
    if type(written) is not str or written != kind or type(fields) is not dict:
        raise MessageError(f"expected a message of kind {kind!r}, found {shown(written)}")
    if type(fields.get("schema")) is not int or not 0 <= fields["schema"] <= schema:
        raise MessageError(
            f"expected {kind!r} with schema <= {schema}, found {shown(fields.get('schema'))}: "
            "update this service to the version that wrote it"
        )


def _writer(cls: type) -> Write:
    """Return the function that returns a record's fields for MessagePack, compiled once."""
    writer = _writers.get(cls)
    if writer is None:
        writer = _writers[cls] = _compiled_writer(cls)
    return writer


def _compiled_writer(cls: type) -> Write:
    known: dict[str, Any] = {"write_columns": write_columns}
    source = f"lambda v: {_expression(cls, 'v', known)}"
    return typing.cast(Write, eval(source, known))  # noqa: S307 (declarations, no data)


def _expression(hint: Any, value: str, known: dict[str, Any]) -> str:
    """Return the Python expression of ``value`` for MessagePack.

    >>> _expression(tuple[str, ...], "v.names", {})
    'v.names'
    """
    if typing.get_origin(hint) is typing.Annotated:
        return _expression(hint.__origin__, value, known)
    if (row := _columnar(hint)) is not None:
        known[row.__name__] = tuple(field.name for field in dataclasses.fields(row))
        return f"write_columns({row.__name__}, {_late[row]!r}, {value})"
    if hint in _registered:
        hints = typing.get_type_hints(hint)
        late = _late.get(hint, ())
        pairs = [
            f"**({{{name!r}: {value}.{name}}} if {value}.{name} else {{}})"
            if name in late
            else f"{name!r}: {_expression(inner, f'{value}.{name}', known)}"
            for name, inner in hints.items()
        ]
        return f"{{{', '.join(pairs)}}}"
    record = next((argument for argument in typing.get_args(hint) if argument in _registered), None)
    if record is None:
        return value
    if typing.get_origin(hint) is not tuple:
        return f"(None if {value} is None else {_expression(record, value, known)})"
    each = value.replace(".", "_")
    return f"[{_expression(record, each, known)} for {each} in {value}]"


def _columnar(hint: Any) -> type | None:
    arguments = typing.get_args(hint)
    return arguments[0] if typing.get_origin(hint) is tuple and arguments[0] in _column_checks else None


def _plain(value: object) -> Any:
    if isinstance(value, np.ndarray):
        return _write_array(value)
    if type(value) in _registered:
        return _writer(type(value))(value)
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
        shape = _SHAPES[ndim].unpack_from(data, 4)
        array = np.frombuffer(data, _DTYPES[dtype], -1, 4 + 4 * ndim)
        return array if array.shape == shape else array.reshape(shape)
    except (IndexError, struct.error) as error:
        raise ValueError(f"broken array: {error}") from error


def late_defaults(cls: type) -> dict[str, Any]:
    """Return the late fields of a registered record with their defaults."""
    late = [field for field in dataclasses.fields(cls) if field.name in _late.get(cls, ())]
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in late
    }


@functools.cache
def fields_of(cls: type) -> dict[str, Reader]:
    """Return the readers of a registered record's fields."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: _reader(hints[field.name], NO_LIMITS) for field in dataclasses.fields(cls)}


def _record(cls: type) -> Reader:
    reader = _records.get(cls)
    if reader is None:
        reader = _records[cls] = record_reader(cls, fields_of(cls), late_defaults(cls))
    return reader


def _reader(hint: Any, limits: FieldLimits) -> Reader:
    if typing.get_origin(hint) is typing.Annotated:
        return _reader(hint.__origin__, next(note for note in hint.__metadata__ if isinstance(note, FieldLimits)))
    if isinstance(hint, typing.NewType):
        return _reader(hint.__supertype__, limits)
    if (row := _columnar(hint)) is not None:
        return columns_reader(row, fields_of(row), _column_checks[row], limits.length, _late[row])
    if typing.get_origin(hint) is not None or isinstance(hint, types.UnionType):
        return _composite_reader(hint, limits)
    if hint in _registered:
        return _record(hint)
    if issubclass(hint, enum.Enum):
        return enum_reader(hint)
    return {int: int_reader, float: float_reader, str: text_reader, bytes: bytes_reader}[hint](limits)


def _composite_reader(hint: Any, limits: FieldLimits) -> Reader:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if (alias := getattr(origin, "__value__", None)) is not None:  # NDArray of later numpy versions
        return _composite_reader(alias[arguments], limits)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return optional(_reader(inner, limits))
    if origin is tuple:
        return tuple_reader(_reader(arguments[0], limits), limits)
    if origin is dict:
        plain = isinstance(arguments[1], types.UnionType) or typing.get_origin(arguments[1]) is typing.Union
        return dict_reader(json_reader() if plain else _reader(arguments[1], limits), limits)
    assert origin is np.ndarray, hint
    return array_reader(np.dtype(typing.get_args(arguments[1])[0]), limits)
