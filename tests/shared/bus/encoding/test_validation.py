"""Fast readers agree with reading one by one."""

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.bus.encoding import validation, wire
from penstock.shared.bus.encoding.record_reader import read_fields, record_reader
from penstock.shared.bus.encoding.validation import INVALID, FieldLimits, Reader
from penstock.shared.bus.messages import Experience, PolicyUpdate, Prompt, Score, StepReport
from tests.chaos.fuzz import Hostile
from tests.shared.bus.test_hostile_messages import MESSAGES
from tests.support import builders


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


INT, FLOAT = validation.int_reader(FieldLimits(0, 7)), validation.float_reader(FieldLimits(0.0, 7.0))
READERS: dict[str, Reader] = {
    "int": validation.int_reader(FieldLimits()),
    "int within limits": INT,
    "float": validation.float_reader(FieldLimits()),
    "float within limits": FLOAT,
    "float that need not be finite": validation.float_reader(FieldLimits(finite=False)),
    "text": validation.text_reader(FieldLimits(length=3)),
    "enum": validation.enum_reader(Colour),
    "json": validation.json_reader(),
    "optional": validation.optional(INT),
    "tuple": validation.tuple_reader(INT, FieldLimits(length=2)),
    "dictionary": validation.dict_reader(FLOAT, FieldLimits(length=2)),
    "array": validation.array_reader(np.dtype(np.int32), FieldLimits(0, 7)),
}
SCALARS = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([0.0, 7.0, -0.5, 7.5, math.nan, math.inf, -math.inf, 1e300, 2**63, -(2**63), 2**64 - 1]),
    st.sampled_from(["", "red", "blue", "grey", "a\ud7ff", True, False, None, b"red", b"", msgpack.Timestamp(1, 1)]),
    st.sampled_from([np.zeros(2, np.int32), np.array([3, -1], np.int32), np.zeros(1)]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)


def outcome(read: Callable[[Any], Any], value: object) -> str:
    """Return the result with types and NaN, or the refusal."""
    try:
        return repr(read(value))
    except INVALID as error:
        return f"refused: {error}"


@pytest.mark.parametrize("name", list(READERS))
@given(
    values=st.lists(VALUES, max_size=5) | st.lists(st.integers(0, 7)) | st.lists(st.floats()) | st.lists(st.text("abc"))
)
def test_many_values_at_once_are_read_as_one_by_one(name: str, values: list[object]) -> None:
    reader = READERS[name]
    assert outcome(reader.read_all, values) == outcome(lambda each: [reader.read(value) for value in each], values)


@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if reader.test])
@given(value=VALUES | st.floats() | st.integers(0, 7))
def test_a_value_that_passes_a_readers_test_is_one_that_it_returns_as_it_is(name: str, value: object) -> None:
    reader = READERS[name]
    if eval(reader.test.format(v="value"), {"value": value}):
        assert reader.read(value) is value


@pytest.mark.parametrize("name", ["int within limits", "float within limits", "text"])
def test_a_readers_test_passes_what_is_sent_in_earnest(name: str) -> None:
    honest = {"int within limits": 7, "float within limits": 7.0, "text": "abc"}[name]
    assert eval(READERS[name].test.format(v="value"), {"value": honest})


@dataclasses.dataclass(frozen=True)
class Small:
    number: int
    share: float
    name: str | None
    counts: dict[str, int]
    word: str = "none"

    def check(self) -> None:
        if self.number == 3:
            raise ValueError("expected no 3")


SMALL = {
    "number": INT,
    "share": FLOAT,
    "name": validation.optional(validation.text_reader(FieldLimits())),
    "counts": validation.dict_reader(INT, FieldLimits()),
    "word": validation.text_reader(FieldLimits()),
}


@pytest.mark.parametrize(
    ("change", "result"),
    [
        ({}, "Small(number=1, share=0.5, name=None, counts={'a': 2}, word='x')"),
        ({"share": 2}, "Small(number=1, share=2.0, name=None, counts={'a': 2}, word='x')"),
        ({"word": ...}, "Small(number=1, share=0.5, name=None, counts={'a': 2}, word='none')"),
        ({"newer": 5}, "Small(number=1, share=0.5, name=None, counts={'a': 2}, word='x')"),
        ({"number": 8}, "refused: number: expected a whole number from 0 to 7, found 8"),
        ({"counts": {"a": "b"}}, "refused: counts: expected a whole number from 0 to 7, found 'b'"),
        ({"number": 8, "counts": 5}, "refused: number: expected a whole number from 0 to 7, found 8"),
        ({"number": 3}, "refused: expected no 3"),
    ],
)
def test_a_compiled_record_reads_defaults_conversions_and_refusals_as_field_by_field(
    change: dict[str, object], result: str
) -> None:
    fields = {"number": 1, "share": 0.5, "name": None, "counts": {"a": 2}, "word": "x", **change}
    fields = {name: value for name, value in fields.items() if value is not ...}
    assert outcome(record_reader(Small, SMALL).read, fields) == result
    assert outcome(lambda sent: read_fields(Small, SMALL, sent), fields) == result


@pytest.mark.parametrize("kind", [Prompt, Experience, PolicyUpdate, StepReport], ids=lambda kind: str(kind.__name__))
def test_a_mutated_message_is_read_by_compiled_readers_as_field_by_field(kind: type) -> None:
    hostile, compared = Hostile(seed=11), 0
    honest = {b"id": b"3", b"data": wire.encode(MESSAGES[kind])}
    others = [{b"id": b"3", b"data": wire.encode(message)} for message in MESSAGES.values()]
    readers = wire.fields_of(kind)
    for _ in range(300):
        try:
            fields = msgpack.unpackb(hostile.entry(honest, others).get(b"data", b""), ext_hook=wire._read_array)
        except (*INVALID, msgpack.UnpackException):
            continue
        compared += 1
        slowly = outcome(lambda sent: read_fields(kind, readers, sent), fields)
        assert outcome(record_reader(kind, readers).read, fields) == slowly
    assert compared > 50


def test_every_score_of_a_group_takes_the_compiled_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("read field by field")

    monkeypatch.setattr("penstock.shared.bus.encoding.record_reader.read_fields", never)
    sent = wire.encode(builders.experience(3))
    scores = [score for each in wire.decode(sent, Experience).scores for score in each.scores]
    assert [type(score) for score in scores] == [Score, Score]
