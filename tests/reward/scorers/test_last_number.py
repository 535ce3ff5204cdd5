"""The last number of a text: whole and of its own, or none."""

import time

import pytest

from penstock.services.reward.scorers.answer.extraction import extract, last_number
from penstock.shared.settings.rewards.scorers import AnswerPlace


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is **5**.", "5"),
        ("The answer is *5*.", "5"),
        ("The answer is __5__.", "5"),
        ("The answer is _5_.", "5"),
        ("The answer is ***5***", "5"),
        ("The answer is **_5_**", "5"),
        ("**Answer: 5**", "5"),
        ("is**5**", "5"),
        ("**5** is the answer", "5"),
        ("<b>5</b>", "5"),
        ('<p>so <span class="x">5</span></p>', "5"),
        ("so -> 5", "5"),
        ("so => 5", "5"),
        ("so --> -5", "-5"),
        ("so → 5", "5"),
        ("$2+3 \\to 5$", "5"),
        ("> 5", "5"),
        ("> so 5", "5"),
        ("So it is 5!", "5"),
        ("It is 42!", "42"),
        ("2+3 -> 5", "5"),
        ("I get 2, so the answer is **5**.", "5"),
        ("I get 2, not **5**", None),
        ("5! = 120 = 5!/1", "1"),
        ("it is $5!$", None),
        ("the value 5! / x", None),
        ("42k", None),
        ("12n", None),
        ("so 3, then 42x", None),
        ("$5x$", None),
        ("5cm", "5"),
        ("5 cm", "5"),
        ("12 cm^2", "12"),
        ("12 cm²", "12"),
        ("12\\text{ cm}^2", "12"),
        ("5 m/s^2", "5"),
        ("an angle of 5°", "5"),
        ("5%", "5%"),
        ("5 %", "5 %"),
        ("5\\%", "5\\%"),
        ("$5", "5"),
        ("$5.50.", "5.50"),
        ("-$5", "-$5"),
        ("€5", "5"),
        ("5€", "5"),
        ("it costs $1,234.50.", "1,234.50"),
        ("1{,}234", "1,234"),
        ("1\\,234", "1,234"),
        ("1,234,567", "1,234,567"),
        ("1,234,567, so", "1,234,567"),
        ("12,34", "34"),
        ("x = 5", "5"),
        ("x = -5", "-5"),
        ("x = - 5", "- 5"),
        ("x=5", "5"),
        ("-5", "-5"),
        ("−5", "-5"),
        ("5.", "5"),
        ("5.0", "5.0"),
        ("5...", "5"),
        ("...5", "5"),
        (".5", ".5"),
        ("1.2.3", None),
        ("2024-05-03", None),
        ("5 on 3/5/2024", None),
        ("2. b: 5", "5"),
        ("\\frac{1}{2}", "\\frac{1}{2}"),
        ("-\\frac{1}{2}", "-\\frac{1}{2}"),
        ("\\frac12", "\\frac12"),
        ("\\dfrac{10}{4}", "\\dfrac{10}{4}"),
        ("2\\frac{1}{2}", "2\\frac{1}{2}"),
        ("\\frac{x}{2}", None),
        ("\\frac{2}{x}", None),
        ("\\frac{x+1}{y-2}", None),
        ("\\frac{x^{2}}{y^{2}+5}", None),
        ("\\boxed{5}", "5"),
        ("\\textbf{5}", "5"),
        ("\\(5\\)", "5"),
        ("\\[ 5 \\]", "5"),
        ("$5$", "5"),
        ("**$5$**", "5"),
        ("\\sqrt{5}", None),
        ("\\sqrt[3]{5}", None),
        ("5\\sqrt{2}", None),
        ("√5", None),
        ("5\\pi", None),
        ("5π", None),
        ("5 pi", None),
        ("2^5", None),
        ("2**5", None),
        ("2 * 5", None),
        ("2 × 5", None),
        ("5²", None),
        ("5<sup>2</sup>", None),
        ("3, so x^2", None),
        ("(x+1)^5", None),
        ("3 or 5", None),
        ("more than 5", None),
        ("x > 5", None),
        ("$x \\ge 5$", None),
        ("x ≤ 5", None),
        ("at least **5**", None),
        ("f(5)", None),
        ("gcd(12, 5)", None),
        ("5 or f(5), which is 7", "7"),
        ("v5", None),
        ("so 5 = x_1", "5"),
        ("so 5 = x_{1}", "5"),
        ("12-34", "34"),
        ("3/4", "3/4"),
        ("3 / 4", "3 / 4"),
        ("2 1/2", "2 1/2"),
        ("x/5", None),
        ("3:5", "5"),
        ("Answer:5", "5"),
        ("about 5 million", "5 million"),
        ("about 5 hundred thousand", "5 hundred thousand"),
        ("1e5", "1e5"),
        ("1e-5", "1e-5"),
        ("答案是5。", "5"),
        ("the 5th", "5"),
        ("5 + 2x", None),
        ("5 + x", None),
        ("(5)", "5"),
        ("(3, 5)", "5"),
        ('"5"', "5"),
        ("- 5", "5"),
        ("3 = 3 \\times 1 = 5", "5"),
        ("5 apples", "5"),
        ("$5 \\text{ dollars}$", "5"),
        ("isn't 5", None),
        ("1. two apples 2. three pears, so 5", "5"),
        ("1. a: 3\n2. b: 5", "5"),
        ("* 2\n* 5", "5"),
        ("so 5 -> it is\n> **3**", "3"),
        ("5?", "5"),
    ],
)
def test_the_last_number_is_whole_or_none(text: str, number: str | None) -> None:
    assert last_number(text) == number


_HOSTILE = (
    "**", "*5", "_", "__a", "<b", "<b ", "-", "=", "> ", ">", "1,", "111,", "1.", "1 ", "1/", "1 /", "-1/", r"\frac", r"\frac{1}{", "{", "{}", "(", "a(",
    "5!", "^", "1^{", "not ", "\n", ". ", " \n", r"\text{ ", r"\text{and", "a =", "  a=", "a_", "a_{1", r"\boxed{1},", r"\boxed{A},  a=", r"\boxed{",
    "A", "(A)", "answer is ", "answer is A\n", "####", "<answer>", "or A", "$", "√(",
)  # fmt: skip


def _seconds(text: str, place: AnswerPlace) -> float:
    def once() -> float:
        start = time.process_time()
        extract(text, place)
        return time.process_time() - start

    return min(once() for _ in range(3))


@pytest.mark.parametrize("place", ["boxed", "last_number", "choice", "tag", "hashes", "auto"])
@pytest.mark.parametrize("piece", _HOSTILE)
def test_the_time_grows_with_the_length_only(place: AnswerPlace, piece: str) -> None:
    texts = [f"{start}{piece * (length // len(piece))}{end}" for length in (4_000, 16_000) for start, end in _ENDS]
    short, long = (texts[: len(_ENDS)], texts[len(_ENDS) :])
    for few, many in zip(short, long, strict=True):
        assert _seconds(many, place) < 12 * _seconds(few, place) + 0.01  # 4 times as long; quadratic would be 16 times


_ENDS = (("", "or"), ("the answer is A", "or B"), (r"\boxed{1},", r"!\boxed{2}"), ("5", "!"))


@pytest.mark.parametrize("piece", ["  a=", " a =", "a_1 =", r"\text{and}", " , ", "and "])
def test_what_is_between_boxes_is_read_once(piece: str) -> None:
    between = (piece * 60)[:58]
    start = time.process_time()
    assert extract(rf"\boxed{{1}},{between}!\boxed{{2}}", "boxed") == "2"
    assert time.process_time() - start < 0.5  # all ways to read the spaces took minutes
