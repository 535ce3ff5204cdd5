"""The format checker and the random scorer."""

import asyncio
import dataclasses
from collections.abc import Mapping

import pytest

from penstock.services.reward.scorers.format import scorer as format_module
from penstock.services.reward.scorers.format.scorer import FormatChecker
from penstock.services.reward.scorers.random_scorer import Lot
from penstock.services.reward.scorers.scorer import unavailable
from penstock.shared.bus.messages import FinishReason, Json, Score, ScoreStatus
from penstock.shared.errors import SettingsError
from penstock.shared.settings.rewards.scorers import FormatScorer
from tests.support import builders

TAGS = {"tags": ["think", "answer"]}
STRICT = {**TAGS, "nothing_outside": True}


def checker(**rules: object) -> FormatChecker:
    return FormatChecker(FormatScorer.model_validate({"kind": "format", **rules}))


async def check(format_checker: FormatChecker, text: str, finish: FinishReason = FinishReason.STOP) -> Score:
    group = builders.group(0, (text,))
    sample = dataclasses.replace(group.samples[0], finish_reason=finish)
    (score,) = await format_checker.score(dataclasses.replace(group, samples=(sample,)))
    return score


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (STRICT, "<think>2+2</think>\n<answer>4</answer>\n"),
        (TAGS, "well <think>2+2</think> so <answer>4</answer>."),
        ({"tags": ["think?", "answer"]}, "<answer>4</answer>"),
        ({"tags": ["a+"]}, "<a>1</a><a>2</a>"),
        ({"pattern": "[0-9]+"}, "46"),
        ({"pattern": "a.b"}, "a\nb"),
        ({"needs_stop": True}, "46"),
    ],
)
async def test_a_completion_that_keeps_every_rule_is_worth_one(rules: dict[str, object], text: str) -> None:
    assert await check(checker(**rules), text) == Score("format", ScoreStatus.OK, 1.0)


@pytest.mark.parametrize(
    ("rules", "text", "value", "first"),
    [
        (TAGS, "<answer>4</answer>", 1 / 3, "expected <think>…</think>, found none"),
        (TAGS, "4", 0.0, "expected <think>…</think>, found none"),
        (TAGS, "<answer>4</answer><think>2</think>", 2 / 3, "expected <answer> after </think>"),
        (TAGS, "<think>a<answer>4</answer></think>", 2 / 3, "expected <answer> after </think>"),
        (TAGS, "<think>a</think><answer>4", 1 / 3, "expected <answer> closed by </answer>, found 1 and 0"),
        (TAGS, "<think>a</think></answer>4<answer>", 1 / 3, "expected <answer> closed by </answer>, found 1 and 1"),
        (TAGS, "<think>a</think><answer>4</answer><answer>5</answer>", 2 / 3, "expected <answer> once, found it 2 times"),
        (STRICT, "so <think>a</think><answer>4</answer>", 3 / 4, "expected nothing outside the tags"),
        (STRICT, "<think>a</think> so <answer>4</answer>", 3 / 4, "expected nothing outside the tags"),
        (STRICT, "<think>a</think><answer>4</answer>!", 3 / 4, "expected nothing outside the tags"),
        ({"pattern": "[0-9]+"}, "46 ", 0.0, "expected text that matches the pattern"),
        ({"pattern": "[0-9]+", "tokens": [4, 0]}, "46", 1 / 2, "expected at least 4 tokens, found 3"),
        ({"tokens": [0, 2]}, "4 + 6", 0.0, "expected at most 2 tokens, found 3"),
    ],
)  # fmt: skip
async def test_the_value_is_the_share_of_rules_that_hold_and_the_first_broken_one_is_named(
    rules: dict[str, object], text: str, value: float, first: str
) -> None:
    scored = await check(checker(**rules), text)
    assert scored.value == pytest.approx(value)
    assert scored == Score("format", ScoreStatus.WRONG_FORMAT, scored.value, first)


async def test_a_completion_that_must_stop_is_wrong_when_it_was_cut() -> None:
    scored = await check(checker(needs_stop=True, tokens=[0, 10]), "46", FinishReason.LENGTH)
    assert scored == Score("format", ScoreStatus.WRONG_FORMAT, 0.5, "the completion was cut at its length limit")


async def test_a_pattern_that_backtracks_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_module, "CHECK_TIMEOUT_S", 0.1)
    scored = checker(pattern=r"(a|aa|a?a)+c[0-9]?")
    assert (await check(scored, "aac")).status is ScoreStatus.OK
    hostile = await check(scored, "a" * 5_000 + "cb")
    assert hostile == Score("format", ScoreStatus.TIMEOUT, 0.0, "pattern took longer than 0.1 s")
    assert (await check(scored, "ac1")).status is ScoreStatus.OK


async def test_a_pattern_that_backtracks_for_ever_holds_up_no_other_scorer_and_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hostile, honest = checker(pattern="(a+)+$"), checker(pattern="a+b?")
    assert hostile._checkers is not None
    ask, may_answer = hostile._checkers.ask, asyncio.Event()

    async def held(question: dict[str, Json], timeout_s: float) -> Mapping[str, Json]:
        try:
            return await ask(question, timeout_s)
        finally:
            await may_answer.wait()

    monkeypatch.setattr(hostile._checkers, "ask", held)
    await asyncio.gather(hostile.start(), honest.start())
    try:
        endless = asyncio.create_task(check(hostile, "a" * 100_000 + "!"))
        assert (await check(honest, "aab")).value == 1.0
        assert not endless.done()
        may_answer.set()
        assert (await endless).status is ScoreStatus.TIMEOUT
        asked = questions(hostile)
        assert (await check(hostile, "a" * 100_000 + "!")).status is ScoreStatus.TIMEOUT
        assert questions(hostile) == asked
        assert (await check(hostile, "a" * 100_000)).value == 1.0
    finally:
        await asyncio.gather(hostile.close(), honest.close())


def questions(format_checker: FormatChecker) -> int:
    assert format_checker._checkers is not None
    return format_checker._checkers.questions


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"pattern": "("}, "expected a regular expression as pattern of scorer 'format', found '('"),
        ({}, "scorer 'format' has no rule"),
        ({"nothing_outside": True}, "scorer 'format' has no rule"),
    ],
)
def test_rules_that_mean_nothing_are_refused(rules: dict[str, object], sentence: str) -> None:
    with pytest.raises(SettingsError, match=r"\[\[reward\.scorers\]\]") as caught:
        checker(**rules)
    assert sentence in str(caught.value)


async def test_a_group_that_is_done_again_draws_the_same_lots() -> None:
    group = builders.group(7, tuple("abcdefghijklmnop"))
    first = [score.value for score in await Lot("random", 0).score(group)]
    assert first == [score.value for score in await Lot("random", 0).score(group)]
    assert set(first) == {0.0, 1.0}
    assert first != [score.value for score in await Lot("random", 1).score(group)]
    assert first != [
        score.value for score in await Lot("random", 0).score(builders.group(8, tuple("abcdefghijklmnop")))
    ]


@pytest.mark.parametrize(
    ("rules", "text", "value"),
    [
        ({"tokens": [3, 3]}, "46", 1.0),
        ({"tokens": [0, 2]}, "46", 0.0),
        ({"scripts": ["Latin"]}, "Ünïcode is Latin: 46 + x, αβ" + "a" * 40, 1.0),
        ({"scripts": ["Latin"]}, "по-русски, or not", 0.0),
        ({"scripts": ["Latin"]}, "12 + 34 = 46", 1.0),
        ({"scripts": ["Han", "Hiragana", "Katakana"]}, "漢字とカタカナ", 1.0),
        ({"scripts": ["Latin"]}, "a" * 19 + "б", 1.0),
        ({"scripts": ["Latin"]}, "a" * 18 + "б", 0.0),
    ],
)
async def test_rules_hold_or_cost_their_share(rules: dict[str, object], text: str, value: float) -> None:
    assert (await check(checker(**rules), text)).value == pytest.approx(value)


SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "maximum": 9}}}


async def test_json_keeps_its_schema_or_says_where_not() -> None:
    scored = checker(json_schema=SCHEMA, json_tag="answer")
    await scored.start()
    try:
        assert (await check(scored, '<answer>{"n": 1}</answer>')).value == 1.0
        for text, detail in (
            ('{"n": 1}', "expected JSON in <answer>…</answer>, found none"),
            (
                '<answer>{"n": 10}</answer>',
                "the JSON violates the schema at $.n: 10 is greater than the maximum of 9",
            ),
            (
                "<answer>n = 1</answer>",
                "expected JSON, found JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
            ),
            (
                '<answer>{"n": 1, "n": 2}</answer>',
                "expected JSON, found ValueError: a name that occurs twice in an object",
            ),
        ):
            assert await check(scored, text) == Score("format", ScoreStatus.WRONG_FORMAT, 0.0, detail)
        for hostile in ("[" * 100_000, "9" * 90_000, "[" * 40_000 + "]" * 40_000, "x" * 200_000):
            assert (await check(scored, f"<answer>{hostile}</answer>")).status is ScoreStatus.WRONG_FORMAT
    finally:
        await scored.close()


async def test_json_with_half_of_a_surrogate_pair_breaks_its_rule_and_the_score_fits_into_a_message() -> None:
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    scored = checker(json_schema=schema)
    await scored.start()
    try:
        single = await check(scored, '{"\\ud800": "x"}')
    finally:
        await scored.close()
    assert (single.status, single.value) == (ScoreStatus.WRONG_FORMAT, 0.0)
    assert single.detail == "the JSON violates the schema at $['?']: 'x' is not of type 'integer'"
    assert unavailable("mine", "\ud800").detail == "?"


async def test_a_schema_that_takes_for_ever_is_given_up_and_the_next_check_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(format_module, "CHECK_TIMEOUT_S", 0.5)
    scored = checker(json_schema={"type": "string", "pattern": "^(a+)+$"})
    try:
        assert (await check(scored, f'"{"a" * 60}!"')).status is ScoreStatus.TIMEOUT
        assert (await check(scored, '"aaa"')).value == 1.0
    finally:
        await scored.close()


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [({"type": "objekt"}, "'objekt' is not valid"), ({"$ref": "http://x/y"}, "outside the schema: 'http://x/y'")],
)
async def test_a_schema_that_is_none_stops_the_start(schema: dict[str, object], sentence: str) -> None:
    scored = checker(json_schema=schema)
    with pytest.raises(SettingsError, match="json_schema of scorer 'format' is not a JSON schema") as caught:
        await scored.start()
    await scored.close()
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"scripts": ["Klingon"]}, "expected names of Unicode scripts as scripts of scorer 'format'"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(rules: dict[str, object], sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        checker(**rules)
    assert sentence in str(caught.value)
