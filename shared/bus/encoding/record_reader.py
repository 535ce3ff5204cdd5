"""Compile a reader that checks a record's fields and constructs it.

Fields that fail their tests fall back to :func:`read_fields`, which applies defaults and names the wrong field. For a
text, a number and an array the source is::

    def read(fields):
        if type(fields) is not dict:
            return slow(fields)
        try:
            v_text = fields["text"]
            ...
        except KeyError:
            return slow(fields)
        if not ((type(v_text) is str and len(v_text) <= 1024) and ...):
            return slow(fields)
        try:
            at = "array"; v_array = read_array(v_array)
        except INVALID as error:
            raise ValueError(f"{at}: {error}") from error
        built = cls(v_text, v_number, v_array)
        return built
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.shared.bus.encoding.validation import INVALID, Reader, shown

NOTHING_LATE: Mapping[str, Any] = MappingProxyType({})


def record_reader(cls: type, readers: Mapping[str, Reader], late: Mapping[str, Any] = NOTHING_LATE) -> Reader:
    """Compile a dataclass's reader; fields of ``late`` may be missing."""
    check = getattr(cls, "check", None)
    known: dict[str, Any] = {f"read_{name}": reader.read for name, reader in readers.items()}
    known |= {f"late_{name}": default for name, default in late.items()}
    known |= {"cls": cls, "check": check, "INVALID": INVALID, "slow": lambda fields: read_fields(cls, readers, fields)}
    exec(_source(readers, late, checked=check is not None), known)  # noqa: S102 (names and limits of declarations, no data)
    return Reader(known["read"])


def _source(readers: Mapping[str, Reader], late: Mapping[str, Any], *, checked: bool) -> str:
    tests = [reader.test.format(v=f"v_{name}") for name, reader in readers.items() if reader.test]
    calls = [name for name, reader in readers.items() if not reader.test]
    lines = [
        "def read(fields):",
        "    if type(fields) is not dict:",
        "        return slow(fields)",
        "    try:",
        *(
            f'        v_{name} = fields.get("{name}", late_{name})'
            if name in late
            else f'        v_{name} = fields["{name}"]'
            for name in readers
        ),
        "    except KeyError:",
        "        return slow(fields)",
        f"    if not ({' and '.join(tests) or True}):",
        "        return slow(fields)",
        '    at = ""',
        "    try:",
        *(f'        at = "{name}"; v_{name} = read_{name}(v_{name})' for name in calls),
        "        pass",
        "    except INVALID as error:",
        '        raise ValueError(f"{at}: {error}") from error',
        f"    built = cls({', '.join(f'v_{name}' for name in readers)})",
        "    check(built)" if checked else "",
        "    return built",
    ]
    return "\n".join(lines)


def read_fields(cls: type, readers: Mapping[str, Reader], fields: Any) -> Any:
    """Read field by field, with the same result."""
    if type(fields) is not dict:
        raise TypeError(f"expected the fields of a {cls.__name__}, found {shown(fields)}")
    values, name = {}, ""
    try:
        for name, reader in readers.items():
            if name in fields:
                values[name] = reader.read(fields[name])
    except INVALID as error:
        raise ValueError(f"{name}: {error}") from error
    record = cls(**values)
    if (check := getattr(cls, "check", None)) is not None:
        check(record)
    return record
