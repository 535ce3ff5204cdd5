"""Laws of the wire format."""

import dataclasses
import math
from typing import Any, TypeVar

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from typing_extensions import TypeAliasType

from penstock.shared.bus.encoding import wire
from penstock.shared.bus.encoding.validation import FieldLimits
from penstock.shared.bus.messages import (
    Experience,
    PolicyRecord,
    PolicyVersion,
    Probe,
    Prompt,
    RolloutGroup,
    SampleScores,
    Score,
    ScoreStatus,
)
from penstock.shared.errors import MessageError
from tests.support import builders

GOLDEN_PROMPT = (
    b"\x8d\xa4kind\xa6prompt\xa6schema\x01\xa8group_id\x03\xa7problem\xadtrain.jsonl:4\xa8sampling\x83\xa7samples\x02"
    b"\xaemax_new_tokens\x04\xabtemperature\xcb?\xf0\x00\x00\x00\x00\x00\x00\xa4text\xa612+34=\xa8messages\xc0"
    b"\xa6answer\xa246\xa5extra\x81\xa5level\x01\xabmin_version\x00\xa7purpose\xa5train\xadadmitted_at_s\xcb?\xf8\x00"
    b"\x00\x00\x00\x00\x00\xa8requeues\x00"
)
NEWER_SAMPLING = (
    b"\x88" + GOLDEN_PROMPT[GOLDEN_PROMPT.index(b"\xa8sampling\x83") + 10 : GOLDEN_PROMPT.index(b"\xa4text")]
    + b"\xa5top_k\x00\xa5top_p\xcb?\xf0\x00\x00\x00\x00\x00\x00\xa5min_p\xcb\x00\x00\x00\x00\x00\x00\x00\x00"
    + b"\xaemin_new_tokens\x00\xa4stop\x90"
)  # fmt: skip
GOLDEN_SCORE = (
    b"\x84\xa6scorer\xa6answer\xa6status\xa7timeout\xa5value\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xa6detail\xa1x"
)
GOLDEN_ARRAY = b"\xc7\x14\x01\x00\x02\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x07\x00\x00\x00\xff\xff\xff\xff"


def test_bytes_written_by_schema_1_stay_readable() -> None:
    before, sampling, after = GOLDEN_PROMPT[1:].partition(b"\xa8sampling\x83")
    newer = (
        before + sampling[:-1] + NEWER_SAMPLING + after[after.index(b"\xa4text") :] + b"\xa7scorers\x90\xa6sample\xc0"
    )
    newer += b"\xa8teachers\x90\xa6row_id\xa0"
    assert wire.encode(builders.prompt(3)) == b"\xde\x00\x11" + newer  # newer fields
    assert wire.decode(GOLDEN_PROMPT, Prompt) == builders.prompt(3)


def test_a_score_written_before_there_was_code_to_run_stays_readable_and_new_statuses_survive() -> None:
    statuses = (ScoreStatus.TIMEOUT, ScoreStatus.MEMORY, ScoreStatus.OUTPUT_LIMIT, ScoreStatus.FORBIDDEN)
    scores = tuple(SampleScores((Score("answer", status, 0.0, "x"),)) for status in statuses)
    written = wire.encode(dataclasses.replace(builders.experience(0, (1.0, 0.0, 0.0, 0.0)), scores=scores))
    newer = b"\x86" + GOLDEN_SCORE[1:] + b"\xa7lenient\x90\xa5parts\x80"  # newer fields
    assert newer in written
    assert wire.decode(written, Experience).scores == scores
    assert wire.decode(written.replace(newer, GOLDEN_SCORE), Experience).scores == scores


def taught(*logprobs: list[float] | None) -> RolloutGroup:
    group = builders.group(0, ("46", "47"))
    parts = [None if part is None else np.array(part, dtype=np.float32) for part in logprobs]
    samples = zip(group.samples, parts, strict=True)
    return dataclasses.replace(
        group, samples=tuple(dataclasses.replace(sample, teacher_logprobs=part) for sample, part in samples)
    )


def test_teacher_logprobs_travel_and_a_group_without_a_teacher_has_none() -> None:
    read = wire.decode(wire.encode(taught([-1.0, -2.0, 0.0], [-3.0, -4.0, -5.0])), RolloutGroup)

    assert [sample.teacher_logprobs.tolist() for sample in read.samples if sample.teacher_logprobs is not None] == [
        [-1.0, -2.0, 0.0],
        [-3.0, -4.0, -5.0],
    ]
    read = wire.decode(wire.encode(taught(None, None)), RolloutGroup)
    assert [sample.teacher_logprobs for sample in read.samples] == [None, None]


@pytest.mark.parametrize(
    ("logprobs", "reason"),
    [
        (([-1.0, -2.0], [-1.0, -2.0, -3.0, -4.0]), "one teacher logprob a token"),
        (([-1.0, -2.0, -3.0], [-1.0, -2.0, math.nan]), "teacher_logprobs: expected numbers from -1e"),
        (([-1.0, -2.0, -3.0], [-1.0, -2.0, 0.01]), "teacher_logprobs: expected numbers from -1e"),
        ((None, [-1.0, -2.0, -3.0]), "teacher_logprobs: expected arrays of all rows, joined, or of none"),
    ],
)
def test_teacher_logprobs_that_are_none_of_the_tokens_are_refused(
    logprobs: tuple[list[float] | None, ...], reason: str
) -> None:
    with pytest.raises(MessageError, match=reason):
        wire.decode(wire.encode(taught(*logprobs)), RolloutGroup)


def topped(*tops: tuple[list[list[int]], list[list[float]]] | None) -> RolloutGroup:
    group = builders.group(0, ("46", "47"))
    parts = [
        {}
        if top is None
        else {"teacher_top_ids": np.array(top[0], np.int32), "teacher_top_logprobs": np.array(top[1], np.float32)}
        for top in tops
    ]
    samples = zip(group.samples, parts, strict=True)
    return dataclasses.replace(group, samples=tuple(dataclasses.replace(sample, **part) for sample, part in samples))  # type: ignore[arg-type]


IDS, LOGPROBS = [[1, 4], [0, 7], [2, 3]], [[-1.0, -0.5], [-3.0, -0.25], [0.0, -1e6]]


def test_a_teachers_most_probable_tokens_travel_and_older_messages_have_none() -> None:
    read = wire.decode(wire.encode(topped((IDS, LOGPROBS), (IDS, LOGPROBS))), RolloutGroup)
    for sample in read.samples:
        assert sample.teacher_top_ids is not None
        assert sample.teacher_top_logprobs is not None
        assert sample.teacher_top_ids.tolist() == IDS
        assert sample.teacher_top_logprobs.tolist() == LOGPROBS
    again = wire.decode(wire.encode(read), RolloutGroup)
    assert [sample.teacher_top_ids.tolist() for sample in again.samples if sample.teacher_top_ids is not None] == [
        IDS,
        IDS,
    ]
    older = wire.unpack(wire.encode(topped(None, None)), RolloutGroup)
    del older["samples"]["teacher_top_ids"], older["samples"]["teacher_top_logprobs"]
    read = wire.decode(msgpack.packb(older, default=wire._plain), RolloutGroup)
    assert [sample.teacher_top_ids for sample in read.samples] == [None, None]


@pytest.mark.parametrize(
    ("ids", "logprobs", "reason"),
    [
        (IDS[:2], LOGPROBS[:2], "most probable tokens and their logprobs at every position"),
        (IDS, LOGPROBS[:2], "most probable tokens and their logprobs at every position"),
        (IDS, [[-1.0]] * 3, "1 to 64 most probable tokens of a teacher with a logprob each, found 2 with 1"),
        ([[]] * 3, [[]] * 3, "1 to 64 most probable tokens of a teacher with a logprob each, found 0 with 0"),
        ([list(range(65))] * 3, [[-9.0] * 65] * 3, "1 to 64 most probable tokens"),
        ([[4, 1], [0, 7], [2, 3]], LOGPROBS, "found ids that do not ascend"),
        ([[1, 1], [0, 7], [2, 3]], LOGPROBS, "found ids that do not ascend"),
        ([[-1, 1], [0, 7], [2, 3]], LOGPROBS, "teacher_top_ids: expected numbers from 0"),
        (IDS, [[-0.1, -0.2], [-3.0, -0.25], [0.0, -1e6]], "found probabilities whose sum is 1.724"),
        (IDS, [[-1.0, math.nan], [-3.0, -0.25], [0.0, -1e6]], "teacher_top_logprobs: expected numbers from -1e"),
        (IDS, [[-1.0, -math.inf], [-3.0, -0.25], [0.0, -1e6]], "teacher_top_logprobs: expected numbers from -1e"),
        (IDS, [[-1.0, 0.01], [-3.0, -0.25], [0.0, -1e6]], "teacher_top_logprobs: expected numbers from -1e"),
        ([1, 2, 3], [-1.0, -2.0, -3.0], "expected an array of int32 with 2 dimensions"),
    ],
)
def test_most_probable_tokens_that_are_of_no_distribution_are_refused(ids: Any, logprobs: Any, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        wire.decode(wire.encode(topped((ids, logprobs), (ids, logprobs))), RolloutGroup)


def test_most_probable_tokens_without_logprobs_or_of_one_sample_are_refused() -> None:
    alone = wire.unpack(wire.encode(topped((IDS, LOGPROBS), (IDS, LOGPROBS))), RolloutGroup)
    alone["samples"]["teacher_top_logprobs"] = [None, None]
    with pytest.raises(MessageError, match="most probable tokens and their logprobs at every position"):
        wire.decode(msgpack.packb(alone, default=wire._plain), RolloutGroup)
    with pytest.raises(MessageError, match="teacher_top_ids: expected arrays of all rows, joined, or of none"):
        wire.decode(wire.encode(topped(None, (IDS, LOGPROBS))), RolloutGroup)


def restricted(sizes: list[list[int]], ids: list[list[int]]) -> RolloutGroup:
    group = builders.experience(0, (1.0, 0.0)).group
    samples = tuple(
        dataclasses.replace(
            sample,
            token_ids=np.array([5, 7], dtype=np.int32),
            behavior_logprobs=np.array([-0.5, -0.25], dtype=np.float32),
            support_sizes=np.array(size, dtype=np.int32),
            support_ids=np.array(part, dtype=np.int32),
        )
        for sample, size, part in zip(group.samples[:2], sizes, ids, strict=True)
    )
    return dataclasses.replace(group, samples=samples)


@pytest.mark.parametrize(
    ("sizes", "ids"),
    [([[2, 1], [1, 3]], [[5, 6, 7], [5, 1, 7, 2]]), ([[-1, 0], []], [[3], []]), ([[0, -2], [2, 0]], [[1, 2], [9, 5]])],
)
def test_the_tokens_that_could_be_drawn_travel_with_their_sample(sizes: list[list[int]], ids: list[list[int]]) -> None:
    decoded = wire.decode(wire.encode(restricted(sizes, ids)), RolloutGroup)
    assert [sample.support_sizes.tolist() for sample in decoded.samples] == sizes
    assert [sample.support_ids.tolist() for sample in decoded.samples] == ids


@pytest.mark.parametrize(
    ("sizes", "ids", "sentence"),
    [
        ([[2], []], [[5, 6], []], "expected a support of every token, or of none"),
        ([[2, 1], []], [[5, 6], []], "expected as many support ids as the sizes say"),
        ([[2, 1], []], [[5, 6, 8], []], "expected drawn tokens within their support"),
        ([[], [-1, 1]], [[], [5, 7]], "expected drawn tokens within their support"),
    ],
)
def test_a_support_without_the_drawn_token_is_refused(
    sizes: list[list[int]], ids: list[list[int]], sentence: str
) -> None:
    with pytest.raises(MessageError, match=sentence):
        wire.decode(wire.encode(restricted(sizes, ids)), RolloutGroup)


def test_an_array_is_raw_little_endian_bytes_behind_dtype_and_shape() -> None:
    written = msgpack.packb(np.array([[7, -1]], dtype=np.int32), default=wire._plain)
    assert written == GOLDEN_ARRAY
    assert wire._read_array(1, GOLDEN_ARRAY[3:]).tolist() == [[7, -1]]


def test_decoded_arrays_are_views_of_the_received_bytes() -> None:
    decoded = wire.decode(wire.encode(builders.group()), RolloutGroup)
    assert not decoded.samples[0].token_ids.flags.owndata
    assert not decoded.samples[0].token_ids.flags.writeable


def test_a_decoded_group_that_is_sent_on_has_the_bytes_it_came_with() -> None:
    written = wire.encode(builders.group())
    received = wire.decode(written, RolloutGroup)
    assert wire.encode(received) == written
    fewer = dataclasses.replace(received, samples=received.samples[1:])
    assert [sample.text for sample in wire.decode(wire.encode(fewer), RolloutGroup).samples] == ["47"]


def test_what_a_stranger_adds_to_a_group_is_not_sent_on() -> None:
    fields = msgpack.unpackb(wire.encode(builders.group()), ext_hook=wire._read_array)
    for place in (fields, fields["prompt"], fields["samples"], fields["samples"]["token_ids"]):
        place["more"] = "x"
    received = wire.decode(msgpack.packb(fields, default=wire._plain), RolloutGroup)
    assert wire.encode(received) == wire.encode(builders.group())


def test_experience_survives_the_journey_whole() -> None:
    sent = builders.experience(7, (1.0, 0.0))
    received = wire.decode(wire.encode(sent), Experience)
    assert received.group.prompt == sent.group.prompt
    assert received.scores == sent.scores
    assert received.rewards.tolist() == [1.0, 0.0]
    assert received.group.samples[1].behavior_logprobs.tolist() == [-0.5, -0.5, -0.5]
    assert received.group.samples[1].behavior_logprobs.dtype == np.float32
    assert received.group.oldest_version == 0


@given(
    npst.arrays(st.sampled_from([np.int32, np.float32, np.uint8, np.bool_]), npst.array_shapes(max_dims=3, min_side=0))
)
def test_any_array_comes_back_as_it_was(array: np.ndarray) -> None:
    extension = wire._write_array(array)
    back = wire._read_array(extension.code, extension.data)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


def test_unknown_fields_are_ignored_and_missing_ones_take_their_default() -> None:
    fields = msgpack.unpackb(GOLDEN_PROMPT)
    del fields["requeues"], fields["purpose"]
    fields["from_the_future"] = 1
    assert wire.decode(msgpack.packb(fields), Prompt) == builders.prompt(3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"schema": 3}, "expected 'prompt' with schema <= 2, found 3: update this service"),
        ({"kind": "rollout_group"}, "expected a message of kind 'prompt', found 'rollout_group'"),
        ({"sampling": 3}, "expected the fields of 'prompt' schema 2, found other ones"),
        ({"messages": "hello"}, "expected the fields of 'prompt' schema 2, found other ones"),
    ],
)
def test_a_message_of_another_form_is_refused_with_a_sentence(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(MessageError, match=sentence[:40]) as caught:
        wire.decode(msgpack.packb({**msgpack.unpackb(GOLDEN_PROMPT), **change}), Prompt)
    assert sentence in str(caught.value)


@given(st.binary(max_size=200))
def test_noise_is_never_anything_but_a_message_error(noise: bytes) -> None:
    with pytest.raises(MessageError):
        wire.decode(noise, Prompt)


def test_an_array_type_that_numpy_names_by_an_alias_is_read() -> None:
    scalar = TypeVar("scalar", bound=np.generic)
    alias = TypeAliasType("alias", np.ndarray[Any, np.dtype[scalar]], type_params=(scalar,))
    reader = wire._reader(alias[np.int32], FieldLimits())
    assert reader.read(np.array([1, 2], np.int32)).tolist() == [1, 2]
    with pytest.raises(TypeError, match="int32"):
        reader.read(np.array([1.0, 2.0]))


def test_a_required_field_that_is_missing_is_named() -> None:
    fields = msgpack.unpackb(GOLDEN_PROMPT)
    del fields["problem"]
    with pytest.raises(MessageError, match="problem"):
        wire.decode(msgpack.packb(fields), Prompt)


def test_samples_are_written_by_columns() -> None:
    written = msgpack.unpackb(wire.encode(builders.group()), ext_hook=wire._read_array)["samples"]
    assert written["rows"] == 2
    assert written["text"] == ["46", "47"]
    assert written["token_ids"]["lengths"] == [3, 3]
    assert written["token_ids"]["joined"].tolist() == [0, 1, 2, 1, 1, 2]
    assert written["version_spans"]["joined"].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 3},
        {"token_ids": {"lengths": [3, 4], "joined": np.zeros(6, np.int32)}},
        {"text": ["46"]},
        {"token_ids": 5},
    ],
)
def test_columns_that_do_not_fit_together_are_refused(change: dict[str, object]) -> None:
    fields = msgpack.unpackb(wire.encode(builders.group()), ext_hook=wire._read_array)
    fields["samples"].update(change)
    with pytest.raises(MessageError, match="rollout_group"):
        wire.decode(msgpack.packb(fields, default=wire._plain), RolloutGroup)


def test_a_group_without_samples_survives() -> None:
    sent = RolloutGroup(builders.prompt(), np.zeros(0, np.int32), (), "r", 1.0, 2.0)
    assert wire.decode(wire.encode(sent), RolloutGroup).samples == ()


def test_a_record_written_before_there_was_a_probe_stays_readable_and_one_with_it_survives() -> None:
    logprobs = np.array([-1.0, -2.0, -3.0], np.float32)
    probe = Probe(np.array([4, 5, 6, 7, 8], np.int32), np.array([3, 2], np.int32), logprobs, noise=-logprobs)
    sent = PolicyRecord(PolicyVersion(3), None, 3, 0.0, "ab", "", source="h:1", probe=probe)
    fields = msgpack.unpackb(wire.encode(sent), ext_hook=wire._read_array)
    decoded = wire.decode(wire.encode(sent), PolicyRecord)
    assert decoded.probe is not None
    assert [(ids.tolist(), logprobs.tolist()) for ids, logprobs in decoded.probe.sequences()] == [
        ([4, 5, 6], [-1.0, -2.0]),
        ([7, 8], [-3.0]),
    ]
    of_before = {
        **fields,
        "probe": {name: fields["probe"][name] for name in ("token_ids", "lengths", "logprobs", "noise")},
    }
    before = wire.decode(msgpack.packb(of_before, default=wire._plain), PolicyRecord).probe
    assert before is not None
    assert len(before.change) == 0
    del fields["probe"], fields["source"]
    oldest = wire.decode(msgpack.packb(fields), PolicyRecord)
    assert (oldest.source, oldest.probe) == ("", None)


def test_every_message_field_is_plain_data() -> None:
    for kind in wire._messages.values():
        assert dataclasses.is_dataclass(kind)


def _spoiled(path: tuple[str, ...], value: object) -> bytes:
    fields = msgpack.unpackb(wire.encode(builders.experience()), ext_hook=wire._read_array)
    place = fields
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return bytes(msgpack.packb(fields, default=wire._plain))


SAMPLES, PROMPT = ("group", "samples"), ("group", "prompt")


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ((*SAMPLES, "rows"), float("inf"), "expected 0 to 65536 rows, found inf"),
        ((*SAMPLES, "rows"), 10**9, "expected 0 to 65536 rows, found 1000000000"),
        ((*SAMPLES, "text"), ["46", 5], "text: expected a text of at most 67108864 characters, found 5"),
        ((*SAMPLES, "token_ids"), [1, 2], "token_ids: expected an array of int32 with 1 dimensions, found 1"),
        (
            (*SAMPLES, "token_ids"),
            {"lengths": [3, 3], "joined": np.array([0, 1, 2, 3, 4, -1], np.int32)},
            "token_ids: expected numbers from 0 to 2.14748e+09, found -1 to 4",
        ),
        (
            (*SAMPLES, "token_ids"),
            {"lengths": [7, -1], "joined": np.zeros(6, np.int32)},
            "expected lengths that add up to 6",
        ),
        (
            (*SAMPLES, "token_ids"),
            {"lengths": [3, 3], "joined": np.zeros(6, np.float32)},
            "expected an array of int32 with 1 dimensions, found float32 of shape (6,)",
        ),
        (
            (*SAMPLES, "token_ids"),
            {"lengths": [2, 4], "joined": np.zeros(6, np.int32)},
            "expected one behavior logprob a token, found other lengths",
        ),
        (
            (*SAMPLES, "behavior_logprobs"),
            {"lengths": [3, 3], "joined": np.array([-1, -1, np.nan, -1, -1, -1], np.float32)},
            "behavior_logprobs: expected numbers from -80 to 0.1, found nan to nan",
        ),
        (
            (*SAMPLES, "version_spans"),
            {"lengths": [2, 2], "joined": np.array([0, 7, 0, 7], np.int32)},
            "version_spans: expected an array of int32 with 2 dimensions",
        ),
        (
            (*SAMPLES, "version_spans"),
            {"lengths": [2, 1], "joined": np.array([[0, 7], [0, 8], [0, 7]], np.int32)},
            "expected version spans that begin at token 0 and ascend",
        ),
        (
            (*SAMPLES, "version_spans"),
            {"lengths": [2, 1], "joined": np.array([[0, 7], [3, 8], [0, 7]], np.int32)},
            "expected version spans that begin at token 0 and ascend",
        ),
        ((*PROMPT, "group_id"), 2**63, "group_id: expected a whole number"),
        ((*PROMPT, "group_id"), True, "group_id: expected a whole number"),
        ((*PROMPT, "answer"), 46, "answer: expected a text"),
        ((*PROMPT, "sampling", "samples"), 10**6, "samples: expected a whole number from 1 to 65536, found 1000000"),
        ((*PROMPT, "sampling", "samples"), 1, "expected at most the 1 samples of the prompt, found 2"),
        ((*PROMPT, "sampling", "temperature"), float("nan"), "temperature: expected a finite number"),
        ((*PROMPT, "extra"), {"a": msgpack.Timestamp(1, 1)}, "extra: expected what JSON can say, found Timestamp"),
        ((*PROMPT, "purpose"), "spy", "purpose: expected one of train, evaluate, ask, demonstrate, found 'spy'"),
        (
            ("rewards",),
            np.array([1.0, np.inf], np.float32),
            "rewards: expected numbers from -3.40282e+38 to 3.40282e+38",
        ),
        (("rewards",), np.zeros(3, np.float32), "found 2 samples, 3 rewards and 2 scores"),
        (("reference_logprobs",), np.zeros(5, np.float32), "expected 6 reference logprobs, found 5"),
        (("kind",), np.zeros(2, np.int32), "expected a message of kind 'experience', found ndarray"),
        (("kind",), "prompt", "expected a message of kind 'experience', found 'prompt'"),
        (("schema",), np.zeros(2, np.int32), "expected 'experience' with schema <= 2, found ndarray"),
        (("schema",), 1, ""),
    ],
)
def test_a_field_that_holds_what_it_must_not_is_refused_with_its_name(
    path: tuple[str, ...], value: object, reason: str
) -> None:
    if not reason:
        assert wire.decode(_spoiled(path, value), Experience).group.prompt.group_id == 0
        return
    with pytest.raises(MessageError) as caught:
        wire.decode(_spoiled(path, value), Experience)
    assert reason in str(caught.value)


def test_values_of_a_row_that_are_nested_too_deep_are_refused() -> None:
    value: object = 0
    for _ in range(40):
        value = [value]
    with pytest.raises(MessageError, match="nested at most 32 deep"):
        wire.decode(_spoiled((*PROMPT, "extra"), {"a": value}), Experience)


def test_an_error_shows_no_more_than_the_beginning_of_what_was_sent() -> None:
    with pytest.raises(MessageError) as caught:
        wire.decode(_spoiled((*PROMPT, "purpose"), "x" * 10**6), Experience)
    assert len(str(caught.value)) < 300
