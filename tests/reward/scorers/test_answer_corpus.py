"""A corpus of equal and different answers for the whole matcher."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from penstock.services.reward.scorers.answer.scorer import AnswerMatcher
from penstock.shared.bus.messages import ScoreStatus
from penstock.shared.settings.rewards.scorers import AnswerScorer
from tests.conftest import PATIENCE_S
from tests.support import builders

EQUAL: dict[str, list[tuple[str, str]]] = {
    "integers": [
        ("46", "46"), ("46", "46."), ("46", " 46 "), ("46", "$46$"), ("46", r"\boxed{46}"), ("-7", "−7"),
        ("1000000", "1,000,000"), ("0", "-0"), ("12", "+12"), ("46", r"\(46\)"), ("7", r"\[7\]"),
    ],
    "decimals": [
        ("0.5", ".5"), ("3.10", "3.1"), ("1500", "1.5e3"), ("1500", r"1.5 \times 10^{3}"), ("0.002", r"2 \cdot 10^{-3}"),
        ("3.0", "3"), ("2.5", r"\boxed{2.50}"),
    ],
    "fractions": [
        ("1/2", "0.5"), (r"\frac{1}{2}", "1/2"), (r"\frac{1}{2}", r"\dfrac{1}{2}"), (r"\frac{1}{2}", r"\tfrac{2}{4}"),
        (r"\frac12", r"\frac{1}{2}"), (r"-\frac{3}{4}", "-0.75"), (r"\frac{-3}{4}", r"-\frac{3}{4}"), (r"\frac{7}{3}", "7/3"),
        (r"2\frac{1}{3}", r"\frac{7}{3}"), (r"\frac{1}{3}", "0.3333333"), (r"\frac{22}{7}", r"\boxed{\frac{22}{7}}"),
    ],
    "percent": [
        ("50%", "0.5"), (r"50\%", "50%"), ("12.5%", r"\frac{1}{8}"), (r"100\%", "1"), ("75 percent", r"75\%"),
    ],
    "money": [("$18", r"\$18"), ("18 dollars", "$18.00"), (r"\$1234.5", r"\$1,234.50"), ("$5", "500 cents")],
    "units": [
        ("5 cm", r"5\text{ cm}"), (r"12\text{ inches}", "1 ft"), (r"90^\circ", "90 degrees"), (r"45^{\circ}", r"45°"),
        ("30 min", r"30 \text{ minutes}"), (r"16\pi\text{ cm}^2", r"16\pi\text{ square centimeters}"), ("8", r"8\,\text{units}"),
    ],
    "roots and powers": [
        (r"\sqrt{8}", r"2\sqrt{2}"), (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"), ("2^{10}", "1024"), (r"\sqrt[3]{27}", "3"),
        ("4^{1/2}", "2"), (r"3\sqrt{5}+1", r"1+3\sqrt{5}"), (r"\sqrt{12}", r"\boxed{2\sqrt{3}}"), ("x^{-1}", r"\frac{1}{x}"),
    ],
    "constants and functions": [
        (r"2\pi", r"\pi \cdot 2"), (r"\frac{\pi}{2}", r"0.5\pi"), (r"\ln 8", r"3\ln 2"), (r"\log_{2} 8", "3"), (r"e^{2}", r"e\cdot e"),
        (r"\sin(\pi/6)", r"\frac{1}{2}"), (r"5!", "120"), (r"\binom{5}{2}", "10"), ("2+3i", "3i+2"), (r"\cos 0", "1"),
    ],
    "polynomials": [
        ("x^2+2x+1", "(x+1)^2"), ("x^2-1", "(x-1)(x+1)"), ("2x+3", "3+2x"), ("ab", "ba"), ("3x^2y", "3yx^2"),
        (r"\frac{x^2-1}{x-1}", "x+1"), ("n(n+1)/2", r"\frac{n^2+n}{2}"), ("-(x-2)", "2-x"),
    ],
    "equations": [("5", "x=5"), ("x=5", "5"), ("y=2x+1", "y=1+2x"), ("y = 2x + 1", "2x + 1 = y")],
    "intervals": [
        ("(1,2]", "(1, 2]"), (r"[0,\infty)", r"[0, \infty)"), (r"(-\infty,3)", r"(-\infty, 3)"), ("[0.5,1]", r"[\frac{1}{2},1]"),
        (r"(-\infty,0)\cup(1,\infty)", r"(-\infty,0) \cup (1,\infty)"), (r"[1,2]\cup[3,4]", r"[3,4]\cup[1,2]"),
    ],
    "inequalities": [("x > 3", "3 < x"), (r"x \le 2", r"x \leq 2"), (r"1 < x < 2", "1<x<2")],
    "sets and lists": [
        (r"\{1,2,3\}", r"\{3,2,1\}"), (r"\{1, 2\}", r"\left\{2, 1\right\}"), ("1,2", "2, 1"), ("-1, 1", r"\pm 1"),
        (r"\{\frac12, 2\}", r"\{2, 0.5\}"), ("3, 5, 7", r"\boxed{3, 5, 7}"), (r"\{x, y\}", r"\{y, x\}"),
    ],
    "tuples": [("(1,2)", "(1, 2)"), (r"(\frac{1}{2}, 3)", "(0.5, 3)"), ("(-1,0,4)", r"\left(-1, 0, 4\right)")],
    "matrices": [
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"\begin{pmatrix}\frac12&0\\0&1\end{pmatrix}", r"\begin{pmatrix}0.5&0\\0&1\end{pmatrix}"),
    ],
    "words": [(r"\text{Monday}", "Monday"), ("A", "(A)"), (r"\text{(B)}", "B"), (r"\text{even}", r"\boxed{\text{even}}")],
    "completions": [
        ("5", "We add 2 and 3. The answer is 5."), (r"\frac{1}{2}", "Therefore the answer is $\\frac{1}{2}$."),
        ("42", "First 6.\nThen 7.\n#### 42"), ("3", r"It was \boxed{2}, no: \boxed{3}"), (r"2\sqrt{3}", r"So $x = 2\sqrt{3}$."),
        ("12", "So we get $3 \\cdot 4 = 12$."), ("$18", "She makes $18 every day.\n#### $18"),
    ],
}  # fmt: skip

UNEQUAL: dict[str, list[tuple[str, str]]] = {
    "integers": [
        ("46", "47"), ("46", "-46"), ("46", "460"), ("46", "4.6"), ("1000000", "1000001"), ("0", "1"), ("12", r"\boxed{21}"),
    ],
    "decimals": [("0.5", "0.51"), ("3.14", r"\pi"), ("1500", "1.5e4"), ("0.1", "0.01")],
    "fractions": [
        (r"\frac{1}{2}", r"\frac{1}{3}"), ("1/2", "2/1"), (r"\frac{3}{4}", "-0.75"), (r"2\frac{1}{3}", r"\frac{2}{3}"), ("1/3", "0.33"),
    ],
    "percent": [("50%", "5%"), ("0.5", "5%"), ("75%", "0.075")],
    "units": [("5", r"6\text{ cm}"), (r"90^\circ", "45"), (r"16\pi\text{ cm}^2", r"15\pi")],
    "roots and powers": [
        (r"\sqrt{8}", r"\sqrt{2}"), ("2^{10}", "20"), (r"\sqrt[3]{27}", "9"), ("x^2", "x^3"), (r"2\sqrt{3}", r"3\sqrt{2}"),
    ],
    "constants and functions": [
        (r"2\pi", r"\pi"), (r"\ln 8", r"2\ln 2"), (r"e^2", "2e"), ("5!", "24"), (r"\binom{5}{2}", "20"), ("2+3i", "2-3i"),
        (r"\sin x", r"\cos x"),
    ],
    "polynomials": [("x^2+2x+1", "(x-1)^2"), ("2x+3", "3x+2"), ("ab", "a+b"), ("x^2-1", "(x-1)^2"), ("x", "y")],
    "equations": [("x=5", "6"), ("y=2x+1", "y=2x-1"), ("5", "x=-5")],
    "intervals": [
        ("(1,2]", "[1,2]"), ("(1,2]", "(1,3]"), (r"[0,\infty)", r"(0,\infty)"), (r"(-\infty,3)", r"(-\infty,-3)"),
        (r"[1,2]\cup[3,4]", "[1,4]"),
    ],
    "inequalities": [("x > 3", "x < 3"), ("x > 3", "x > 4")],
    "sets and lists": [
        (r"\{1,2,3\}", r"\{1,2\}"), (r"\{1,2\}", r"\{1,3\}"), ("1,2", "1,3"), ("1,2", "1"), ("3, 5, 7", "3, 5"),
    ],
    "tuples": [("(1,2)", "(2,1)"), ("(1,2)", "(1,3)"), ("(1,2)", "(1,2,3)")],
    "matrices": [
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    ],
    "words": [(r"\text{Monday}", "Tuesday"), ("A", "B"), (r"\text{even}", "odd"), ("no", "yes")],
    "completions": [
        ("5", "The answer is 6."), ("42", "42 is wrong.\n#### 43"), ("3", r"It was \boxed{3}, no: \boxed{2}"), ("7", "I do not know."),
        ("5", ""),
    ],
}  # fmt: skip

HOSTILE = [
    "10^{10^{10}}", "10**10**10", "9" * 100_000, "(" * 100_000, "x^" * 50_000, "{" * 50_000 + "}" * 50_000, "\\frac{" * 10_000,
    "$" * 100_000, "1," * 40_000, "\\sqrt{" * 300 + "2" + "}" * 300, "\\boxed{" * 10_000, "((((((((((1+1))))))))))^" * 40,
    "((x+1)^{1000}+1)^{1000}", "\x00\ud7ff\U0010ffff",
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def matcher() -> AsyncIterator[AnswerMatcher]:
    answer_matcher = AnswerMatcher(AnswerScorer(kind="answer"), timeout_s=20.0)
    await answer_matcher.start()
    yield answer_matcher
    await answer_matcher.close()


async def _values(matcher: AnswerMatcher, pairs: list[tuple[str, str]]) -> list[float | None]:
    async def value(reference: str, text: str) -> float | None:
        group = builders.group(0, (text,))
        (score,) = await matcher.score(
            dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, answer=reference))
        )
        return score.value

    return list(await asyncio.gather(*(value(*pair) for pair in pairs)))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", EQUAL)
async def test_answers_that_mean_the_same_are_equal(matcher: AnswerMatcher, kind: str) -> None:
    values = await _values(matcher, EQUAL[kind])
    assert [pair for pair, value in zip(EQUAL[kind], values, strict=True) if value != 1.0] == []


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", UNEQUAL)
async def test_answers_that_mean_something_else_are_not(matcher: AnswerMatcher, kind: str) -> None:
    values = await _values(matcher, UNEQUAL[kind])
    assert [pair for pair, value in zip(UNEQUAL[kind], values, strict=True) if value != 0.0] == []


async def test_what_is_written_to_break_the_matcher_ends_in_time_with_a_word_that_says_so() -> None:
    hasty = AnswerMatcher(AnswerScorer(kind="answer"), timeout_s=2.0)
    group = builders.group(0, tuple(HOSTILE))
    try:
        await hasty.start()
        async with asyncio.timeout(PATIENCE_S):
            scores = await hasty.score(group)
        honest = await hasty.score(builders.group(1, ("46", "It is 46.")))
    finally:
        await hasty.close()
    said = {score.status for score in scores}
    assert said <= {ScoreStatus.OK, ScoreStatus.WRONG_FORMAT, ScoreStatus.TIMEOUT, ScoreStatus.CRASHED}
    assert [(text[:20], score.status) for text, score in zip(HOSTILE, scores, strict=True) if score.value != 0.0] == []
    assert all(score.detail for score in scores)
    assert scores[0].status is ScoreStatus.OK, "a power of ten is not 46, which nobody need compute"
    assert [score.value for score in honest] == [1.0, 1.0]


def test_the_corpus_is_as_large_as_it_says() -> None:
    pairs = [pair for table in (EQUAL, UNEQUAL) for kind in table.values() for pair in kind]
    assert len(pairs) >= 150
    assert len(set(pairs)) == len(pairs)
