"""Verdicts of the answer matcher: a human-labelled corpus, generated pairs, and text meant to break the reader.

In ``answer_corpus.jsonl`` ``needs`` names the lenient rules that a right answer requires.
"""

import asyncio
import dataclasses
import doctest
import json
import random
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import get_args

import pytest
import pytest_asyncio

from penstock.services.reward.scorers.answer import extraction, matching, notation, prose, shapes, units, words
from penstock.services.reward.scorers.answer.extraction import extract
from penstock.services.reward.scorers.answer.mathematics import comparison, plain_numbers
from penstock.services.reward.scorers.answer.scorer import AnswerMatcher
from penstock.shared.bus.messages import Score
from penstock.shared.settings.rewards.scorers import AnswerPlace, AnswerScorer
from tests.support import builders
from tests.support.answer_pairs import EQUAL, UNEQUAL, Pair, pairs

DEFAULT = set(AnswerScorer(kind="answer").lenient)
SUPPORT = Path(__file__).parents[2] / "support"
CORPUS = [json.loads(line) for line in (SUPPORT / "answer_corpus.jsonl").read_text().splitlines()]
SEED = 2026
REFUSED_SHARE = 0.01


class Matchers:
    """One matcher per requested settings."""

    def __init__(self) -> None:
        self._matchers: dict[str, AnswerMatcher] = {}

    async def score(self, reference: str, text: str, **settings: object) -> Score:
        key = json.dumps(settings, sort_keys=True)
        if key not in self._matchers:
            scorer = AnswerScorer.model_validate({"kind": "answer", **settings})
            self._matchers[key] = AnswerMatcher(scorer, timeout_s=60.0)
        group = builders.group(0, (text,))
        prompt = dataclasses.replace(group.prompt, answer=reference)
        (score,) = await self._matchers[key].score(dataclasses.replace(group, prompt=prompt))
        return score

    async def close(self) -> None:
        for matcher in self._matchers.values():
            await matcher.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def matchers() -> AsyncIterator[Matchers]:
    matchers = Matchers()
    yield matchers
    await matchers.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_every_pair_of_the_corpus_has_the_verdict_that_a_person_gave(matchers: Matchers) -> None:
    wrong = []
    for row in CORPUS:
        score = await matchers.score(row["reference"], row["text"], extract=row["extract"], mode=row["mode"])
        if score.value != float(row["equal"] and set(row["needs"]) <= DEFAULT):
            wrong.append(row)
    assert wrong == []
    assert len(CORPUS) == 360
    refused = [row["reference"] for row in CORPUS if row["equal"] and not set(row["needs"]) <= DEFAULT]
    assert refused == ["25", "(3,4)"], "right to a person, and refused by default"


@pytest.mark.asyncio(loop_scope="module")
async def test_what_leniency_accepts_in_the_corpus_says_so(matchers: Matchers) -> None:
    forgiven = [row for row in CORPUS if row["needs"]]
    for row in forgiven:
        score = await matchers.score(row["reference"], row["text"], extract=row["extract"], lenient=row["needs"])
        assert (score.value, list(score.lenient)) == (1.0, row["needs"]), row
    assert len(forgiven) == 16


@pytest.mark.asyncio(loop_scope="module")
async def test_no_pair_made_by_rule_is_accepted_wrongly_and_few_are_refused_wrongly(matchers: Matchers) -> None:
    made = list(pairs(SEED))
    scores = await asyncio.gather(
        *(matchers.score(pair.reference, rf"\boxed{{{pair.answer}}}", extract="boxed") for pair in made)
    )
    accepted = {pair for pair, score in zip(made, scores, strict=True) if score.value == 1.0}
    bare = {pair for pair, score in zip(made, scores, strict=True) if "units" in score.lenient}
    assert {pair.rule for pair in bare} == {"unit_dropped", "percent_sign_dropped"}, "counted as lenient"
    assert [pair for pair in made if pair in accepted - bare and not pair.equal] == []
    refused = [pair for pair in made if pair.equal and pair not in accepted]
    assert refused == []
    assert len(made) >= 1_000
    assert sum(pair.equal for pair in made) >= 500


@pytest.mark.asyncio(loop_scope="module")
async def test_words_around_a_number_count(matchers: Matchers) -> None:
    """Two sets of labelled answers, written before and after the rules for words; these verdicts differ."""
    rows = [json.loads(line) for line in (SUPPORT / "answer_words.jsonl").read_text(encoding="utf-8").splitlines()]
    differing = []
    for _, kind, reference, text, equal in rows:
        score = await matchers.score(reference, text, extract="choice" if kind == "choice" else "auto")
        if (score.value == 1.0) is not equal:
            differing.append(text)
    assert len(rows) == 693
    assert differing == [
        "One bound is 30.",
        "Thus she spent $30 on lunch.",
        "They need 30 more chairs.",
        "The train travels at 30 miles per hour.",
        "Therefore, 30 students passed.",
        r"So we get $\boxed{|{-4}|+0}$.",
        r"So we get $\boxed{\text{none}}$.",
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_strict_settings_accept_nothing_that_took_a_lenient_rule(matchers: Matchers) -> None:
    strict = {"extract": "auto", "lenient": [], "tolerance": 0.0}
    for reference, text, rule in (
        ("5", "The answer is 5.", "prose"),
        ("Oslo", "OSLO", "case"),
        (r"\frac13", "0.3333333", "tolerance"),
        (r"\sqrt{2}", "1.4142136", "tolerance"),
    ):
        assert (await matchers.score(reference, text)).lenient == (rule,)
        assert (await matchers.score(reference, text, **strict)).value == 0.0
    assert (await matchers.score("5", "5", **strict)).value == 1.0
    scorer = AnswerScorer.model_validate({"kind": "answer", "lenient": ["units"]}).strict()
    assert (scorer.lenient, scorer.tolerance) == ((), 0.0)


def _mutated(lot: random.Random, text: str) -> str:
    """Replace, repeat or remove a few pieces."""
    for _ in range(lot.randint(1, 4)):
        start, length = lot.randrange(len(text) + 1), lot.randint(0, 6)
        piece = lot.choice(_PIECES) * lot.choice((1, 1, 1, 2, 5, 40))
        text = text[:start] + piece + text[start + lot.choice((0, length)) :]
    return text


_PIECES = (
    "^", "_", "{", "}", "(", ")", "[", "]", ",", ";", "=", "<", "-", "+", "*", "/", "\\", "\\\\", "$", "%", "\\%", "0", "9", "17", ".", " ", "x", "e", "i",
    "\\frac", "\\sqrt", "\\pi", "\\text{", "\\infty", "\\pm", "^2", "^{99}", "^\\circ", "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\cup", "\\leq", "or",
    " and ", "cm", "é", "٣", "²", "√", "\u200b", "\ud800", "\x00", "\n", "x=", "\\{", "\\}", "(x+y+z)^9", "10^{999}", "1e999", "_2", ":", "!", "|", "the answer is ",
)  # fmt: skip


def _texts(seed: int, count: int) -> Iterable[Pair]:
    """Yield mutated answers with their references."""
    lot = random.Random(seed)
    base = list(pairs(seed, each=6))
    for _ in range(count):
        pair = lot.choice(base)
        yield dataclasses.replace(pair, answer=_mutated(lot, lot.choice((pair.answer, pair.reference, ""))))


def longest_s(seed: int, count: int) -> tuple[float, Pair]:
    """Return the CPU time of the slowest comparison in this process, and its answer; errors propagate.

    ::

        python -c "from tests.reward.scorers.test_answer_verdicts import longest_s; print(longest_s(7, 2_000_000))"
    """
    lenient = ("case", "prose", "units", "percent", "bases", "brackets", "restating")
    longest, worst = 0.0, Pair("", "", "", equal=False)
    for pair in _texts(seed, count):
        started_s = time.process_time()
        for attempt in matching.attempts(pair.reference, pair.answer, lenient):
            for expected, given in attempt.pairs:
                plain_numbers.read(expected), plain_numbers.read(given)
        took_s = time.process_time() - started_s
        if took_s > longest:
            longest, worst = took_s, pair
    return longest, worst


HOSTILE = (
    "," * 999 + "x", " " * 999 + "x", "x" + " " * 900 + "or" + " " * 90, ".," * 499, "9," * 99 + "9", r"\{" + ",".join(map(str, range(10, 75))) + r"\}",
    r"\{" + ",".join(rf"\sqrt{{{n}}}" for n in range(10, 28)) + r"\}", "(x+y+z+a+b+k+n)^2" * 11, "(x+y+z)^9+(x+y)^8", "(x+y)^9(x+z)^9", "(1+\\sqrt2+\\pi)^9" * 9,
    "(x+y+z)^4" * 20, "(x+1)^{16}" * 19, "x^9" * 60, r"\sqrt{999983}" * 15, r"\frac{1}{\sqrt{999979}}+" * 8 + "1", "<" * 300, "x<" * 150, "x=" * 400, "$" * 999, "{" * 999, "(" * 999,
    "a " * 499, "the answer is " * 280, "$x$ " * 999, "is " * 1300, "no " * 1300, "9" * 999, "1,234" * 199, "1,111" + ",111" * 240, "-" * 999, "\\text{a}" * 120, "\\pm" * 300, "_2" * 400, "1/" * 400,
    "cm " * 99, "5" + " cm" * 98, "5" + "/cm" * 90, "\\," * 300, "(1," * 300, "\\frac{" * 140, "\\begin{pmatrix}" * 60, "9&" * 90, "²" * 999, "√" * 999, "√(" * 400, "٣" * 999,
    "aa" + " " * 50_000 + "b", "answer " * 20_000, "\\boxed{" * 20_000, "#" * 100_000, "A" * 100_000, "(A) " * 9_000, "\n" * 100_000,
)  # fmt: skip


def test_text_that_is_meant_to_stall_raises_nothing_and_is_read_in_bounded_work() -> None:
    for text in HOSTILE:
        for reference in ("5", "x+1", r"\{1, \sqrt{2}\}", text[:900]):
            for place in get_args(AnswerPlace):
                extract(text, place)
            for attempt in matching.attempts(reference, text, ("prose", "units", "brackets", "restating")):
                for pair in attempt.pairs:
                    plain_numbers.read(pair[1])


@pytest.mark.slow
def test_no_text_raises_in_this_process() -> None:
    longest_s(SEED, 20_000)


def test_some_texts_raise_nothing_in_this_process() -> None:
    longest_s(SEED + 1, 5_000)


def test_every_rule_makes_pairs_and_the_same_ones_again() -> None:
    first, again = list(pairs(1)), list(pairs(1))
    assert first == again
    assert {pair.rule for pair in first} == {*EQUAL, *UNEQUAL}


def test_what_fails_in_this_process_is_left_to_computer_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = AnswerMatcher(AnswerScorer(kind="answer"))
    monkeypatch.setattr(plain_numbers, "close", lambda *_: 1 // 0)
    assert matcher._score_at_once("5", "6") is None
    monkeypatch.undo()
    monkeypatch.setattr(matching, "attempts", lambda *_: 1 // 0)
    assert matcher._score_at_once("x+1", "\\ln x") is None


def test_the_examples_in_the_docstrings_of_the_reader_hold() -> None:
    modules = (
        extraction,
        matching,
        notation,
        plain_numbers,
        prose,
        shapes,
        units,
        words,
        comparison,
    )
    results = [doctest.testmod(module) for module in modules]
    assert [result.failed for result in results] == [0] * len(modules)
    assert all(result.attempted for result in results)
