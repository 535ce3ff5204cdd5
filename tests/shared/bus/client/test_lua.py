"""Laws of the scripts' headers."""

import re
from collections.abc import Mapping

import pytest

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.client.lua import SCRIPTS, Given, parse
from penstock.shared.bus.keys import COUNTS, Keys
from penstock.shared.bus.streams import EXPERIENCE, PROMPTS, ROLLOUTS
from tests.support.raw_redis import raw

HEADER = "#!lua\n-- Try.\n-- KEYS: input counts\n-- ARGV: group entries...\n"
BODY = "return redis.call('XACK', input, group, #entries, counts)\n"
TRY = parse("try", HEADER + BODY)
GIVEN: Mapping[str, Given] = {"entries": ["1-1", "2-1"], "group": "reward", "input": ROLLOUTS}


def test_names_become_positions_in_the_order_of_the_header_and_a_declared_key_is_filled_in() -> None:
    assert TRY.bind(Keys("r"), GIVEN) == (
        ["penstock:{r}:rollouts", "penstock:{r}:counts"],
        ["reward", "1-1", "2-1"],
    )
    assert TRY.text == (
        "#!lua\n-- Try.\nlocal input, counts = KEYS[1], KEYS[2]\n"
        "local group = ARGV[1] local entries = {} for i = 2, #ARGV do entries[i - 1] = ARGV[i] end\n" + BODY
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"group": None}, "script try: expected the names input, group, entries, found entries, input"),
        ({"grop": "reward"}, "expected the names input, group, entries, found"),
        ({"counts": COUNTS}, "expected the names input, group, entries, found"),
        ({"input": "rollouts"}, "script try: expected a key or a stream, found 'rollouts'"),
        ({"group": EXPERIENCE}, "script try: expected text, bytes or a number as an argument, found"),
        ({"entries": "1-1"}, "expected a list as entries... only if it ends in ..., found '1-1'"),
        ({"group": ["reward"]}, "expected a list as group only if it ends in ..., found"),
        ({"entries": [PROMPTS]}, "expected text, bytes or a number as an argument"),
    ],
)
def test_what_does_not_fit_the_header_is_refused_at_the_call(change: Mapping[str, Given | None], sentence: str) -> None:
    given = {name: value for name, value in {**GIVEN, **change}.items() if value is not None}
    with pytest.raises(TypeError, match=re.escape(sentence)):
        TRY.bind(Keys("r"), given)


@pytest.mark.parametrize(
    ("header", "body", "wrong"),
    [
        ("-- KEYS: input input\n", "return redis.call('XLEN', input)", "input"),
        ("-- KEYS: input\n-- ARGV: input\n", "return redis.call('XLEN', input)", "input"),
        ("-- KEYS: input output\n", "return redis.call('XLEN', input)  -- output", "output"),
        ("-- KEYS: input\n", "return redis.call('XLEN', KEYS[1], input)", "KEYS"),
        ("-- KEYS: input\n", "return redis.call('XACK', input, ARGV[1])", "ARGV"),
        ("-- KEYS: input\n-- ARGV: ids... group\n", "return redis.call('XACK', input, group, ids)", "ids..."),
        ("-- KEYS: input\n", "local input = redis.call('XLEN', input)", "input"),
        ("-- KEYS: input\n", "for _, input in ipairs({}) do end", "input"),
        ("-- KEYS: in-put\n", "return in-put", "in-put"),
        ("", "return 1", "no keys"),
    ],
)
def test_a_header_that_is_not_what_the_script_uses_is_refused_when_it_is_read(
    header: str, body: str, wrong: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"wrong: {wrong}") + "$"):
        parse("try", f"#!lua\n{header}{body}\n")


async def test_every_script_is_one_that_the_server_takes(bus: Bus) -> None:
    for script in SCRIPTS.values():
        assert (await raw(bus).script_load(script.text)) in (script.digest, script.digest.encode())


def test_every_script_that_adds_to_a_stream_is_known() -> None:
    added = {
        name: set(re.findall(r"'XADD', (\w+)", script.text))
        for name, script in SCRIPTS.items()
        if "XADD" in script.text
    }
    assert added == {
        "admit": {"source", "experience"},
        "commit": {"journal", "audit", "steps", "published"},
        "appoint": {"holds"},
        "discard": {"audit"},
        "end_evaluation": {"holds"},
        "hand_over": {"output", "audit"},
        "leave": {"dead", "audit"},
        "promote": {"policy"},
        "requeue": {"source"},
        "restore": {"journal"},
        "revive": {"stream"},
        "roll_back": {"history", "events"},
        "start_evaluation": {"source", "holds"},
        "transition": {"history"},
    }, "a new writer belongs into the map of shared/bus/streams.py"
