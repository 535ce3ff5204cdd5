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
"""

import dataclasses
import enum
import struct
import threading
import types
import typing
from collections.abc import Callable, Mapping
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

T = TypeVar("T")
_Reader = Callable[[Any], Any]
_messages: dict[str, type] = {}
_kinds: dict[type, tuple[str, int]] = {}
_readers: dict[type, dict[str, _Reader | None]] = {}
_columns: set[type] = set()
_writers: dict[type, dict[str, type | None]] = {}
_local = threading.local()


def record(cls: type[T]) -> type[T]:
    """Register a dataclass that appears inside messages."""
    _readers[cls] = {}
    return cls


def columns(cls: type[T]) -> type[T]:
    """Register a dataclass whose tuples inside messages are written by columns."""
    _columns.add(cls)
    return record(cls)


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
        MessageError: the bytes are no MessagePack, of another kind, of a newer schema, or lack a required field.
    """
    try:
        fields = msgpack.unpackb(data, ext_hook=_read_array)
    except (ValueError, msgpack.UnpackException) as error:
        raise MessageError(f"expected a MessagePack message, found {len(data)} bytes that are none: {error}") from error
    kind, schema = _kinds[expected]
    if not isinstance(fields, dict) or fields.get("kind") != kind:
        found = fields.get("kind") if isinstance(fields, dict) else type(fields).__name__
        raise MessageError(f"expected a message of kind {kind!r}, found {found!r}")
    if not isinstance(fields.get("schema"), int) or fields["schema"] > schema:
        raise MessageError(
            f"expected {kind!r} with schema <= {schema}, found {fields.get('schema')!r}: "
            "update this service to the version that wrote it"
        )
    try:
        return typing.cast(T, _build(expected, fields))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise MessageError(f"expected the fields of {kind!r} schema {schema}, found others: {error}") from error


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


def _read_columns(row: type, written: Mapping[str, Any]) -> tuple[Any, ...]:
    rows = int(written["rows"])
    columns = {
        name: _read_column(reader, written[name]) for name, reader in _readers_of(row).items() if name in written
    }
    if any(len(column) != rows for column in columns.values()):
        raise ValueError(f"expected columns of {rows} rows, found { ({n: len(c) for n, c in columns.items()}) }")
    names = list(columns)
    return tuple([row(**dict(zip(names, values, strict=True))) for values in zip(*columns.values(), strict=True)])


def _read_column(reader: _Reader | None, column: Any) -> list[Any]:
    if isinstance(column, dict):
        joined, start = _require_array(column["joined"]), 0
        ends = np.cumsum(column["lengths"]).tolist()
        if not ends or ends[-1] != len(joined):
            raise ValueError(f"expected lengths that add up to {len(joined)}, found {ends[-1:]}")
        arrays = []
        for end in ends:
            arrays.append(joined[start:end])
            start = end
        return arrays
    return column if reader is None else [reader(value) for value in column]


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
        shape = struct.unpack_from(f"<{ndim}I", data, 4)
        return np.frombuffer(data, dtype=_DTYPES[dtype], offset=4 + 4 * ndim).reshape(shape)
    except (IndexError, struct.error) as error:
        raise ValueError(f"broken array: {error}") from error


def _build(cls: type, fields: Mapping[str, Any]) -> Any:
    values = {}
    for name, reader in _readers_of(cls).items():
        if name in fields:
            values[name] = reader(fields[name]) if reader is not None else fields[name]
    return cls(**values)


def _readers_of(cls: type) -> dict[str, _Reader | None]:
    readers = _readers[cls]
    if not readers:
        hints = typing.get_type_hints(cls)
        readers.update({field.name: _reader(hints[field.name]) for field in dataclasses.fields(cls)})
    return readers


def _reader(hint: Any) -> _Reader | None:
    """Return how to turn a decoded value into ``hint``; None where it already is one."""
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        inner = next((reader for a in arguments if (reader := _reader(a)) is not None), None)
        return None if inner is None else lambda value: None if value is None else inner(value)
    if (row := _columnar(hint)) is not None:
        return lambda written: _read_columns(row, written)
    if origin is tuple:
        return _tuple_reader(_reader(arguments[0]))
    if origin is dict:
        return _dict_reader(_reader(arguments[1]))
    if isinstance(hint, type) and hint in _readers:
        return lambda value: _build(hint, value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint
    if origin is np.ndarray:
        return _require_array
    return None


def _tuple_reader(inner: _Reader | None) -> _Reader:
    return tuple if inner is None else lambda values: tuple([inner(value) for value in values])


def _dict_reader(inner: _Reader | None) -> _Reader | None:
    return None if inner is None else lambda values: {name: inner(value) for name, value in values.items()}


def _require_array(value: Any) -> npt.NDArray[Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"expected an array, found {type(value).__name__}")
    return value
