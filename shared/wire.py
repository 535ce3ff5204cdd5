"""MessagePack with raw arrays: bytes ↔ messages, and nothing else.

A message is a map ``{"kind": str, "schema": int, <field>: <value>, ...}``. A numpy array is one extension value
(type 1)::

    offset  0        1       2         4                  4 + 4·ndim
            ┌────────┬───────┬─────────┬──────────────────┬───────────────────────────┐
            │ dtype  │ ndim  │ 0  0    │ ndim × uint32 LE │ elements, little-endian C │
            └────────┴───────┴─────────┴──────────────────┴───────────────────────────┘

Decoded arrays are read-only views of the received bytes. Unknown fields are ignored, missing ones take their default,
a newer ``schema`` is refused. There is no pickle. This module knows no message type: classes register themselves
with :func:`message`, nested records with :func:`record`.
"""

import dataclasses
import enum
import struct
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


def record(cls: type[T]) -> type[T]:
    """Register a dataclass that appears inside messages."""
    _readers[cls] = {}
    return cls


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
    return typing.cast(bytes, msgpack.packb({"kind": kind, "schema": schema, **_fields(value)}, default=_plain))


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
    return {name: getattr(value, name) for name in _readers_of(type(value))}


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
    return msgpack.ExtType(ARRAY_EXTENSION, header + array.astype(little, copy=False).tobytes())


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
    if origin is tuple:
        return _tuple_reader(_reader(arguments[0]))
    if isinstance(hint, type) and hint in _readers:
        return lambda value: _build(hint, value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint
    if origin is np.ndarray:
        return _require_array
    return None


def _tuple_reader(inner: _Reader | None) -> _Reader:
    return tuple if inner is None else lambda values: tuple([inner(value) for value in values])


def _require_array(value: Any) -> npt.NDArray[Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"expected an array, found {type(value).__name__}")
    return value
