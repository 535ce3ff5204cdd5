"""Compile the reader of a record: how its fields are checked and the record is made.

Where every field was sent, and those with a test pass it, a record costs one call for each other field. All else is read field by
field, which also knows defaults and names the field that is wrong. For a record of a text, a number and an array the source is::

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
        return cls(v_text, v_number, v_array)
"""

from collections.abc import Sequence
from typing import Any

from shared.bus.validation import INVALID, Reader, shown


def record_reader(cls: type, readers: dict[str, Reader]) -> Reader:
    """Return the reader of a record, a dataclass whose fields are read by ``readers``.

    It is compiled: where every field was sent and those with a test pass it, a record takes one call for each other field. All else
    takes :func:`_read_fields`, which also knows defaults and says which field is wrong.
    """
    check, slow = getattr(cls, "check", None), lambda fields: _read_fields(cls, readers, fields)
    names = list(readers)
    tests = [reader.test.format(v=f"v_{name}") for name, reader in readers.items() if reader.test]
    calls = [f'at = "{name}"; v_{name} = read_{name}(v_{name})' for name, reader in readers.items() if not reader.test]
    gets = [f'v_{name} = fields["{name}"]' for name in names]
    source = _lines(gets, tests, calls, [f"v_{name}" for name in names], checked=check is not None)
    known = {"cls": cls, "slow": slow, "check": check, "INVALID": INVALID}
    known |= {f"read_{name}": reader.one for name, reader in readers.items()}
    exec(source, known)  # noqa: S102 (names and limits of our own declarations, no data)
    return Reader(known["read"])


def _lines(
    gets: Sequence[str], tests: Sequence[str], calls: Sequence[str], values: Sequence[str], *, checked: bool
) -> str:
    lines = [
        "def read(fields):",
        "    if type(fields) is not dict:",
        "        return slow(fields)",
        "    try:",
        *(f"        {get}" for get in gets),
        "    except KeyError:",
        "        return slow(fields)",
        f"    if not ({' and '.join(tests) or True}):",
        "        return slow(fields)",
    ]
    if calls:
        lines += [
            "    try:",
            *(f"        {call}" for call in calls),
            "    except INVALID as error:",
            '        raise ValueError(f"{at}: {error}") from error',
        ]
    built = f"cls({', '.join(values)})"
    lines += [f"    built = {built}", "    check(built)", "    return built"] if checked else [f"    return {built}"]
    return "\n".join(lines)


def _read_fields(cls: type, readers: dict[str, Reader], fields: Any) -> Any:
    if type(fields) is not dict:
        raise TypeError(f"expected the fields of a {cls.__name__}, found {shown(fields)}")
    values, name = {}, ""
    try:
        for name, reader in readers.items():
            if name in fields:
                values[name] = reader.one(fields[name])
    except INVALID as error:
        raise ValueError(f"{name}: {error}") from error
    built = cls(**values)
    check = getattr(built, "check", None)
    if check is not None:
        check()
    return built
