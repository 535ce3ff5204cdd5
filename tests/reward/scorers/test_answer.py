"""Laws of the answer matcher."""

import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from fractions import Fraction
from typing import Literal
from unittest.mock import AsyncMock

import pytest
import pytest_asyncio

from penstock.services.reward.scorers.answer import notation
from penstock.services.reward.scorers.answer import scorer as answer_scorer
from penstock.services.reward.scorers.answer.extraction import extract
from penstock.services.reward.scorers.answer.mathematics import plain_numbers
from penstock.services.reward.scorers.answer.scorer import COMMAND, AnswerMatcher
from penstock.services.reward.subprocess_pool.pool import Crashed, Overdue
from penstock.shared.bus.messages import FinishReason, RolloutGroup, Score, ScoreStatus
from penstock.shared.errors import PermanentError, SettingsError
from penstock.shared.settings.rewards.scorers import AnswerPlace, AnswerScorer
from tests.support import builders
from tests.support.children import children

Mode = Literal["exact", "numeric", "math"]
NO_PROCESS = ("/nonexistent/matcher",)


def asked(reference: str | None, *texts: str) -> RolloutGroup:
    group = builders.group(0, texts)
    return dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, answer=reference))


def matcher(
    mode: Mode = "math",
    place: str = "auto",
    command: tuple[str, ...] = NO_PROCESS,
    timeout_s: float = 5.0,
    **more: object,
) -> AnswerMatcher:
    settings = AnswerScorer.model_validate({"kind": "answer", "mode": mode, "extract": place, **more})
    return AnswerMatcher(settings, command=command, timeout_s=timeout_s)


async def score(answer_matcher: AnswerMatcher, reference: str, text: str) -> Score:
    (only,) = await answer_matcher.score(asked(reference, text))
    return only


@pytest.mark.parametrize(
    ("place", "text", "answer"),
    [
        ("whole", "  46\n", "46"),
        ("whole", " \n ", None),
        ("boxed", r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"first \boxed{1}, no: \boxed{2}", "2"),
        ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("boxed", r"\boxed{\frac{1}{2}", None),
        ("boxed", r"\boxed{}", None),
        ("boxed", r"\boxed{1} and \boxed{-2}", "1, -2"),
        ("boxed", r"$x=\boxed{1}$, or $x = \boxed{2}$", "1, 2"),
        ("boxed", r"first \boxed{C}, on second thoughts \boxed{E}", "E"),
        ("boxed", r"\boxed{1} and \boxed{2", None),
        ("boxed", r"`\boxed{42}`. I wrote it inside \boxed as you asked.", "42"),
        ("boxed", r"`\boxed{42}` is what I put in `\boxed{...}`", "42"),
        ("choice", r"$\boxed{\langle H\rangle \ll \Delta E}$ … **Answer: D**", "D"),
        ("choice", r"\boxed{E: A polygenic score}", "E"),
        ("choice", r"\boxed{D. Both A and B}", "D"),
        ("choice", r"\boxed{A. or B}", None),
        ("choice", r"\boxed{A) B) C)} The answer is A", None),
        ("last_number", "it is not 5", None),
        ("last_number", "more than 5, x > 5, f(5), $5!$", None),
        ("last_number", "about 5 million", "5 million"),
        ("boxed", r"$\boxed5$", "5"),
        ("boxed", r"\boxed 12.", "12"),
        ("boxed", r"\boxed {5}", "5"),
        ("boxed", r"\fbox{5}", "5"),
        ("boxed", "\\boxed{5 % not 6\n}", "5"),
        ("boxed", r"\boxedtimes{5}", None),
        ("boxed", "\\boxed{" + "1" * 10_000 + "}", None),
        ("boxed", "46", None),
        ("hashes", "2 + 3 = 5\n#### 5\n", "5"),
        ("hashes", "#### 1\n#### 2", "2"),
        ("hashes", "5", None),
        ("hashes", "##### 5", None),
        ("last_number", "3 apples and 4 pears: 7 fruits", "7"),
        ("last_number", "it costs $1,234.50.", "1,234.50"),
        ("last_number", "12-34", "34"),
        ("last_number", "x = -5", "-5"),
        ("last_number", "about 75%", "75%"),
        ("last_number", "that is 3/4 of it", "3/4"),
        ("last_number", "none", None),
        ("last_number", "v5", None),
        ("last_number", "5²", None),
        ("last_number", "it is ５", "5"),
        ("tag", "<answer>1</answer> no: <answer> 2 </answer>", "2"),
        ("tag", "<answer>2", None),
        ("tag", "</answer>2<answer>", None),
        ("tag", "2", None),
        ("auto", r"#### 1 \boxed{2}", "2"),
        ("auto", "#### 1", "1"),
        ("auto", "46", "46"),
        ("auto", "", None),
    ],
)
def test_the_answer_stands_where_it_was_declared(place: AnswerPlace, text: str, answer: str | None) -> None:
    assert extract(text, place) == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("46", 46),
        ("-0046", -46),
        ("−3", -3),
        ("+.5", Fraction(1, 2)),
        ("1,234,567.25", Fraction(4938269, 4)),
        ("2.5e-3", Fraction(1, 400)),
        ("3/4", Fraction(3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        ("50%", Fraction(1, 2)),
        (r"50\%", Fraction(1, 2)),
        ("$18$", 18),
        (r"\$18.00", 18),
        ("5.", 5),
        ("1/0", None),
        ("1e9999", None),
        ("12,34", None),
        ("10**10", None),
        ("0x10", None),
        ("1_000", None),
        ("nan", None),
        ("inf", None),
        ("٣", None),  # a digit, but not of any reference
        ("", None),
        ("9" * 101, None),
    ],
)
def test_only_a_plain_number_is_read_as_one(text: str, value: int | Fraction | None) -> None:
    reading = plain_numbers.read(text)
    assert (reading.share if reading else None) == value


@pytest.mark.parametrize(
    ("place", "text"), [("boxed", r"\boxed{46}"), ("tag", "<answer>46</answer>"), ("hashes", "#### 46")]
)
async def test_a_reference_may_be_written_otherwise_than_completions(place: str, text: str) -> None:
    for reference in ("12+34 = <<12+34=46>>46\n#### 46", r"so \boxed{46}", "46"):
        assert (await score(matcher("numeric", place), reference, text)).value == 1, reference
        assert (await score(matcher("numeric", place), reference, "46")).status is ScoreStatus.WRONG_FORMAT


@pytest.mark.parametrize(("place", "written"), [("tag", "<answer>{}</answer>"), ("hashes", "#### {}")])
async def test_an_exact_reference_is_read_as_completions_are(place: str, written: str) -> None:
    assert (await score(matcher("exact", place), r"\boxed{46}", written.format(r"\boxed{46}"))).value == 1
    assert (await score(matcher("exact", place), r"\boxed{46}", written.format("46"))).value == 0


@pytest.mark.parametrize(
    ("mode", "reference", "text", "value"),
    [
        ("exact", "yes", "yes", 1.0),
        ("exact", "yes", " yes\n", 1.0),
        ("exact", "yes", "Yes", 0.0),
        ("exact", "46", "46.0", 0.0),
        ("numeric", "46", "46.0", 1.0),
        ("numeric", "46", "47", 0.0),
        ("numeric", "1000", "1,000", 1.0),
        ("numeric", "0.75", "3/4", 1.0),
        ("numeric", "75%", "0.75", 1.0),
        ("numeric", "75%", "75", 1.0),
        ("numeric", "46", "forty-six", 1.0),
        ("numeric", "75", "0.75", 0.0),
        ("numeric", "0.3333333", "1/3", 1.0),
        ("numeric", "0.33", "1/3", 0.0),
        ("numeric", "0", "0.0000001", 0.0),
        ("math", "46", "46", 1.0),
        ("math", "46", "046", 1.0),
        ("math", "1/2", r"\boxed{\frac{1}{2}}", 1.0),
        ("math", "1/2", "0.5", 1.0),
        ("math", "10000001", "10000002", 0.0),  # whole numbers have no tolerance in mathematics
        ("math", "1/3", "0.333333", 1.0),
        ("math", r"x^2", r"\boxed{x^2}", 1.0),
        ("math", "3 + 4 = 7\n#### 7", "7", 1.0),  # the reference is extracted like the answer
    ],
)
async def test_text_and_plain_numbers_need_no_process(mode: Mode, reference: str, text: str, value: float) -> None:
    scored = await score(matcher(mode), reference, text)
    assert (scored.status, scored.value) == (ScoreStatus.OK, value)


async def test_the_declared_tolerance_is_relative() -> None:
    near = matcher("numeric", tolerance=0.01)
    assert [(await score(near, "200.5", text)).value for text in ("201.5", "202.5", "203.5")] == [1.0, 1.0, 0.0]


async def test_whole_numbers_are_exact_however_they_are_written_unless_declared_otherwise() -> None:
    pairs = [
        ("1000003", "1000002.0"),
        ("123456789", "123456700.0"),
        ("1099511627776", "1.0995116e12"),
        ("3", "3.0000001"),
    ]
    for mode in ("math", "numeric"):
        assert [(await score(matcher(mode), *pair)).value for pair in pairs] == [0.0] * 4
        scores = [await score(matcher(mode, lenient=["whole"]), *pair) for pair in pairs]
        assert [(each.value, each.lenient) for each in scores] == [(1.0, ("whole",))] * 4


@pytest.mark.parametrize(
    ("mode", "place", "text", "detail"),
    [
        ("numeric", "auto", "many", "expected a number, found 'many'"),
        ("numeric", "auto", "10**10**10", "expected a number, found '10**10**10'"),
        ("math", "boxed", "46", r"expected \boxed{…}, found none"),
        ("math", "hashes", "46", "expected #### before the answer, found none"),
        ("numeric", "last_number", "none", "expected a number, found none"),
        ("math", "auto", " ", "expected an answer, found none"),
    ],
)
async def test_a_completion_without_an_answer_is_wrong_format_and_says_why(
    mode: Mode, place: AnswerPlace, text: str, detail: str
) -> None:
    assert await score(matcher(mode, place), "46", text) == Score("answer", ScoreStatus.WRONG_FORMAT, 0.0, detail)


async def test_a_wrong_answer_is_shown_in_the_detail() -> None:
    assert await score(matcher(), "46", "47") == Score("answer", ScoreStatus.OK, 0.0, "found '47'")


async def test_a_completion_cut_at_its_length_is_wrong_format_where_it_must_stop() -> None:
    group = asked("46", "46", "46")
    cut = dataclasses.replace(group.samples[1], finish_reason=FinishReason.LENGTH)
    group = dataclasses.replace(group, samples=(group.samples[0], cut))
    assert [scored.value for scored in await matcher(needs_stop=True).score(group)] == [1.0, 0.0]
    assert [scored.value for scored in await matcher(needs_stop=False).score(group)] == [1.0, 1.0]


@pytest.mark.parametrize("reference", [None, "", "  "])
async def test_a_prompt_without_a_reference_answer_can_never_be_scored(reference: str | None) -> None:
    with pytest.raises(PermanentError, match=r"but it is empty: change data\.answer_field"):
        await matcher().score(asked(reference, "46"))


async def test_a_reference_that_is_no_number_can_never_be_scored_as_one() -> None:
    with pytest.raises(PermanentError, match=r"expected a number as the answer of train\.jsonl:1, found 'many'"):
        await matcher("numeric").score(asked("many", "10"))


def test_an_endless_tolerance_is_refused() -> None:
    with pytest.raises(SettingsError, match="change tolerance"):
        matcher(tolerance=float("inf"))


async def test_a_matcher_that_cannot_be_started_is_unavailable_and_plain_numbers_go_on() -> None:
    broken = matcher()
    await broken.start()
    unknown, known = await broken.score(asked("46", r"\ln 46", "46"))
    assert (unknown.status, unknown.value) == (ScoreStatus.UNAVAILABLE, None)
    assert (known.status, known.value) == (ScoreStatus.OK, 1.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mathematics() -> AsyncIterator[AnswerMatcher]:
    answer_matcher = matcher(command=COMMAND, timeout_s=20.0)
    await answer_matcher.start()
    yield answer_matcher
    await answer_matcher.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("reference", "text", "value"),
    [
        (r"\frac{1}{2}", r"\frac12", 1.0),
        (r"\frac{3}{4}\pi", r"\boxed{\frac{3\pi}{4}}", 1.0),
        (r"\frac{1}{3}", r"\frac{1}{4}+x", 0.0),
        (r"2\sqrt{2}", r"\sqrt{8}", 1.0),
        (r"\sqrt{2}", "1.414214", 1.0),
        (r"\sqrt{2}", "1.41", 0.0),
        ("x^2+2x+1", "(x+1)^2", 1.0),
        ("x^2+2x+1", "(x-1)^2", 0.0),
        ("(1,2]", r"\boxed{(1, 2]}", 1.0),
        ("(1,2]", "[1,2]", 0.0),
        (r"(3,\infty)", r"(3, +\infty)", 1.0),
        (r"\{1,2,3\}", r"\{3,2,1\}", 1.0),
        (r"\{1,2,3\}", r"\{1,2\}", 0.0),
        ("1,2", "2, 1", 1.0),
        (r"5 \text{ cm}", "5", 1.0),
        ("5", r"5\text{ apples}", 1.0),
        (r"5 \text{ apples}", "5 apples", 1.0),
        (r"90^\circ", "90", 1.0),
        (r"90^\circ", r"\frac{\pi}{2}", 1.0),
        ("10", "10 m/s", 1.0),
        (r"25\%+25\%", "0.5", 1.0),
        ("5", "x = 5", 1.0),
        ("y=2x+1", "y=1+2x", 1.0),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", 1.0),
        ("2^{10}", "1024", 1.0),
        (r"1.5\times 10^3", "1500", 1.0),
        (r"\text{Monday}", "Monday", 1.0),
        ("A", "(A)", 1.0),
        ("A", "B", 0.0),
        (r"\frac{1}{2}", "So the answer is $\\frac{2}{4}$.", 1.0),
        ("5", "We add 2 and 3, so the answer is 5.", 1.0),
        ("5", "We add 2 and 3, so the answer is 6.", 0.0),
        ("46", "12+34", 0.0),
        ("46", r"\frac{12+34}{1}", 0.0),
        (r"\boxed{1} and \boxed{-2}", r"\boxed{1,-2}", 1.0),
        (r"\boxed{1} and \boxed{-2}", r"$\boxed{1}$ and $\boxed{-2}$", 1.0),
        (r"\boxed{1} and \boxed{-2}", r"\boxed{-2}", 0.0),
        ("-2", r"\boxed{1}$ and $\boxed{-2}", 0.0),
        ("$5$ or $9$", r"\boxed{5 \text{ or } 9}", 1.0),
        ("$5$ or $9$", r"\boxed{5, 9}", 1.0),
        ("$x=-1$ or $x=1$", r"\boxed{-1, 1}", 1.0),
        ("$48$,$384$", r"\boxed{48, 384}", 1.0),
        (r"1;$\frac{8}{9}$", r"\boxed{\frac{8}{9}, 1}", 1.0),
        (r"$\$ 3040$", r"\boxed{3040}", 1.0),
        (r"$\$ 3040$", r"\boxed{\$3040}", 1.0),
        ("5", "The answer is more than 5.", 0.0),
        ("5", "It is more than 5.", 0.0),
        ("5", r"\boxed{\text{at least }5}", 0.0),
        ("5", "It cannot be 5.", 0.0),
        ("5", "Up to 5.", 0.0),
        ("5", "The answer is 5 million.", 0.0),
        ("5,000,000", "The answer is 5 million.", 1.0),
        ("60", r"\boxed{5 \text{ dozen}}", 1.0),
        ("5", r"\boxed{5\text{ negative}}", 0.0),
        ("5", r"\boxed{5 factorial}", 0.0),
        ("5", r"\boxed{5'}", 0.0),
        ("5", r"\boxed{5\ldots}", 0.0),
        ("x^2=-1", "x^2=-2", 0.0),
        (r"\frac{1}{2}45^3", r"\frac{91125}{2}", 1.0),
        (r"\frac{e^{-20}20^{10}}{10!}", r"\frac{e^{-20}20^{11}}{11!}", 0.0),
        (r"1-\frac{365!}{335!\cdot365^{30}}", r"1-\frac{365!}{336!\cdot365^{29}}", 0.0),
        (r"1-\frac{365!}{335!\cdot365^{30}}", r"\boxed{1-e^{-100}}", 0.0),
        (r"\frac{100!}{50!\,50!\,2^{100}}", r"\frac{100!}{49!\,51!\,2^{100}}", 0.0),
        ("1-e^{-50}", "1-e^{-60}", 0.0),
        (r"\sqrt2\cdot10^{-18}", r"\sqrt2\cdot10^{-17}", 0.0),
        (r"\frac{\sqrt2+1}{10^{20}}", r"\frac{\sqrt2-1}{10^{20}}", 0.0),
        (r"\frac{1}{20!}", r"\frac{1}{21!}", 0.0),
        (r"\ln(1+10^{-30})", r"\ln(1+10^{-31})", 0.0),
        (r"\{\sqrt2\cdot10^{-18}, 1\}", r"\{\sqrt2\cdot10^{-17}, 1\}", 0.0),
        (r"(\frac{\pi}{30!}, e^{-50}]", r"(\frac{\pi}{31!}, e^{-50}]", 0.0),
        ("(5,3]", "(7,2]", 0.0),
        (r"\emptyset", r"\{\}", 1.0),
        (r"\begin{pmatrix}e^{-50}\\1\end{pmatrix}", r"\begin{pmatrix}e^{-60}\\1\end{pmatrix}", 0.0),
        (r"y = e^{-50}\sin x", r"y = e^{-60}\sin x", 0.0),
        (r"\frac{20!}{20^{20}}", r"\frac{19!}{20^{19}}", 1.0),
        (r"\sqrt{2+\sqrt3}", r"\frac{\sqrt6+\sqrt2}{2}", 1.0),
        (r"e^{\pi\sqrt{163}}", "640320^3+744", 0.0),
        (r"0.1\cdot10^{-400}\sqrt2", r"0.2\cdot10^{-500}\sqrt2", 0.0),
    ],
)
async def test_mathematics_is_compared_by_value(
    mathematics: AnswerMatcher, reference: str, text: str, value: float
) -> None:
    scored = await score(mathematics, reference, text)
    assert (scored.status, scored.value) == (ScoreStatus.OK, value)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is **18**.", 1.0),
        ("**Final Answer: 18**", 1.0),
        ("**Answer:** 18", 1.0),
        ("Final answer: **18**.", 1.0),
        ("9 * 2 = 18", 1.0),
        ("16 - 3 - 4 + 9 = 9 * 2 = 18", 1.0),
        ("12 + 5 = 18", 0.0),
        ("6 = 18", 0.0),
        ("18 = 9 * 2", 0.0),
        ("9 * 2 = 17 + 1", 0.0),
        ("The answer is **19**.", 0.0),
        ("The answer is 2**18", 0.0),
    ],
)
async def test_bold_text_and_worked_sums_are_read_as_a_person_reads_them(
    mathematics: AnswerMatcher, text: str, value: float
) -> None:
    scored = await score(mathematics, "#### 18", text)
    assert (scored.status, scored.value) == (ScoreStatus.OK, value)


@pytest.mark.parametrize(
    ("preset", "reference", "text", "value"),
    [
        ("math-verify", "18", "It is $18$ apples, or not", 1.0),
        ("math-verify", r"\frac{1}{3}", "so $0.3333333$", 1.0),
        ("math-verify", "1-e^{-50}", r"$\boxed{1-e^{-60}}$", 0.0),
        ("qwen-math", r"50\%", r"\boxed{50}", 1.0),
        ("qwen-math", r"\frac{1}{3}", r"\boxed{0.33333}", 1.0),
        ("strict", "Oslo", "oslo", 0.0),
        ("strict", r"\frac{1}{3}", r"\boxed{0.33333333}", 0.0),
    ],
)
async def test_a_preset_gives_the_verdict_of_what_it_is_named_after(
    preset: str, reference: str, text: str, value: float
) -> None:
    of_preset = matcher(command=COMMAND, timeout_s=20.0, preset=preset)
    try:
        assert (await score(of_preset, reference, text)).value == value
    finally:
        await of_preset.close()


def test_a_preset_beside_a_leniency_of_ones_own_is_refused() -> None:
    with pytest.raises(ValueError, match='expected preset = "own" beside lenient'):
        matcher(preset="math-verify", lenient=["case"])
    with pytest.raises(ValueError, match='expected preset = "own" beside this mode'):
        matcher(mode="exact", preset="strict")


@pytest.mark.parametrize(
    "text",
    [
        "**Answer:** 18 dollars",
        "So she makes $18 every day.",
        "Thus, she earns **$18** per day.",
        "There are 18 eggs left in the basket.",
        "#### $18 per day",
    ],
)
async def test_an_amount_in_a_sentence_is_its_number_where_the_reference_has_no_unit(text: str) -> None:
    assert (await score(matcher(), "#### 18", text)).value == 1.0
    assert (await score(matcher(lenient=["case", "prose"]), "#### 18", text)).value == 0.0


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("text", ["x" * 100_000, "7 " * 50_000, "(" * 100_000, r"\frac{" * 20_000, "9" * 100_000])
async def test_a_formula_too_long_to_be_read_is_wrong_format(mathematics: AnswerMatcher, text: str) -> None:
    scored = await score(mathematics, "46", text)
    assert (scored.status, scored.value) == (ScoreStatus.WRONG_FORMAT, 0.0)


@pytest.mark.asyncio(loop_scope="module")
async def test_equal_answers_are_compared_once_and_remembered(mathematics: AnswerMatcher) -> None:
    asked_before = mathematics._processes.questions
    group = asked(r"\ln 4", r"2\ln 2", r"\boxed{2\ln 2}", r"\boxed{ 2\ln 2}", r"2\ln 3")
    assert [scored.value for scored in await mathematics.score(group)] == [1.0, 1.0, 1.0, 0.0]
    assert [scored.value for scored in await mathematics.score(group)] == [1.0, 1.0, 1.0, 0.0]
    assert mathematics._processes.questions == asked_before + 2


@pytest.mark.parametrize("error", [Overdue("no answer within 1 s"), Crashed("killed")])
async def test_a_reference_that_could_not_be_compared_is_no_bad_one(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = matcher(preset="math-verify")
    monkeypatch.setattr(busy._processes, "ask", AsyncMock(side_effect=error))
    assert await busy.matches_itself(r"\int x dx")


async def test_a_completion_of_any_length_is_not_read_as_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading 10 MB takes seconds of the event loop."""
    lengths = list[int]()

    def plain(text: str) -> str:
        lengths.append(len(text))
        return notation.plain(text)

    monkeypatch.setattr(answer_scorer, "plain", plain)
    whole = matcher(mode="numeric", place="whole")
    scored = await whole.score(asked("46", "9" * 1_000_000, "46.0", f"{46:0100}"))
    assert [score.value for score in scored] == [0.0, 1.0, 1.0]
    assert max(lengths, default=0) < 100
    assert scored[0].status is ScoreStatus.WRONG_FORMAT


async def test_an_endless_comparison_is_killed_and_the_next_one_works() -> None:
    hasty = matcher(command=COMMAND, timeout_s=2.0)
    await hasty.start()
    before = _matchers()
    try:
        endless, other = await hasty.score(asked(r"\pi!", r"\boxed{(\pi-1)!\pi}", r"It is $\pi!$."))
        assert (endless.status, endless.value, endless.detail) == (ScoreStatus.TIMEOUT, 0.0, "no answer within 2 s")
        assert (other.status, other.value) == (ScoreStatus.OK, 1.0)
        assert _matchers() == before, "a fork of the same process went on"
    finally:
        await hasty.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("text", ["10^{10^{10}}", "46!!!!!", r"\binom{10^9}{10^8}", "9^{9^{9^{46}}}", "(x+y+z)^{900}"])
async def test_what_is_too_large_to_compute_is_not_begun(mathematics: AnswerMatcher, text: str) -> None:
    scored = await score(mathematics, r"\sqrt{46}", rf"\boxed{{{text}}}")
    assert (scored.status, scored.value) == (ScoreStatus.TIMEOUT, 0.0)
    assert scored.detail == "computing it would take too long"


async def test_no_matcher_process_is_left_behind() -> None:
    before = _matchers()
    answer_matcher = matcher(command=COMMAND)
    await answer_matcher.start()
    assert len(_matchers() - before) == 2
    await answer_matcher.close()
    assert _matchers() == before


async def test_a_matcher_process_that_is_killed_from_outside_costs_no_verdict() -> None:
    actual = matcher(command=COMMAND, timeout_s=20.0)
    before = _matchers()
    await actual.start()
    try:
        for pid in _matchers() - before:
            os.kill(pid, signal.SIGKILL)
        assert (await score(actual, "5", "It is 5.")).value == 1.0
    finally:
        await actual.close()


def _matchers() -> set[int]:
    return {process.pid for process in children(COMMAND[-1])}
