"""Laws of the format checker and of the lot."""

import dataclasses

import pytest

from services.reward import format as format_module
from services.reward.format import FormatChecker
from services.reward.lot import Lot
from shared.errors import SettingsError
from shared.messages import FinishReason, Score, ScoreStatus
from shared.scorers import FormatScorer
from tests import builders

TAGS = {"tags": [{"tag": "think"}, {"tag": "answer"}]}
STRICT = {**TAGS, "nothing_outside": True}


def checker(**rules: object) -> FormatChecker:
    return FormatChecker(FormatScorer.model_validate({"kind": "format", **rules}))


async def check(found: FormatChecker, text: str, finish: FinishReason = FinishReason.STOP) -> Score:
    group = builders.group(0, (text,))
    sample = dataclasses.replace(group.samples[0], finish_reason=finish)
    (score,) = await found.score(dataclasses.replace(group, samples=(sample,)))
    return score


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (STRICT, "<think>2+2</think>\n<answer>4</answer>\n"),
        (TAGS, "well <think>2+2</think> so <answer>4</answer>."),
        ({"tags": [{"tag": "think", "required": False}, {"tag": "answer"}]}, "<answer>4</answer>"),
        ({"tags": [{"tag": "a", "once": False}]}, "<a>1</a><a>2</a>"),
        ({"pattern": "[0-9]+"}, "46"),
        ({"pattern": "a.b"}, "a\nb"),
        ({"min_characters": 2, "max_characters": 2}, "46"),
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
        ({"pattern": "[0-9]+", "min_characters": 3}, "46", 1 / 2, "expected at least 3 characters, found 2"),
        ({"max_characters": 3}, "4 + 6", 0.0, "expected at most 3 characters, found 5"),
    ],
)  # fmt: skip
async def test_the_value_is_the_share_of_rules_that_hold_and_the_first_broken_one_is_named(
    rules: dict[str, object], text: str, value: float, first: str
) -> None:
    found = await check(checker(**rules), text)
    assert found.value == pytest.approx(value)
    assert found == Score("format", ScoreStatus.WRONG_FORMAT, found.value, first)


async def test_a_completion_that_must_stop_is_wrong_when_it_was_cut() -> None:
    found = await check(checker(needs_stop=True, max_characters=10), "46", FinishReason.LENGTH)
    assert found == Score("format", ScoreStatus.WRONG_FORMAT, 0.5, "expected an end, found its length limit")


async def test_a_pattern_that_backtracks_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_module, "PATTERN_TIMEOUT_S", 0.1)
    found = checker(pattern=r"(a|aa|a?a)+c[0-9]?")
    assert (await check(found, "aac")).status is ScoreStatus.OK
    hostile = await check(found, "a" * 5_000 + "cb")
    assert hostile == Score("format", ScoreStatus.TIMEOUT, 0.0, "pattern took longer than 0.1 s")
    assert (await check(found, "ac1")).status is ScoreStatus.OK


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"pattern": "("}, "expected a regular expression as pattern of scorer 'format', found '('"),
        ({}, "expected at least one rule for scorer 'format', found none"),
        ({"nothing_outside": True}, "expected at least one rule for scorer 'format', found none"),
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
