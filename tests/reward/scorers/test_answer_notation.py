"""Scaled numbers, units and empty signs: which texts are decided without computer algebra, and how."""

import pytest

from penstock.services.reward.scorers.answer.extraction import choice
from penstock.services.reward.scorers.answer.matching import attempts, read
from penstock.services.reward.scorers.answer.notation import plain
from penstock.services.reward.scorers.answer.units import split_unit

_ALL = ("units", "added_unit", "brackets", "prose")


@pytest.mark.parametrize(
    ("text", "core"),
    [
        ("1 hundred thousand", "100000"),
        ("2 hundred million people", "200000000"),
        ("-5 million", "-5000000"),
        ("2.5 million", "2500000"),
        (r"5\text{ million}", "5000000"),
        ("5 million dollars", "5000000"),
        ("3 hundred", "300"),
        ("2 dozens", "24"),
        ("1/2 million", "1/2 million"),
        ("1 / 2 million", "1 / 2 million"),
        ("1 1/2 million", "1 1/2 million"),
        (r"\frac12 million", r"\frac12 million"),
        ("2^3 million", "2^3 million"),
        (r"\frac{8}{1} dozens", r"\frac{8}{1} dozens"),
    ],
)
def test_only_a_whole_plain_number_is_scaled(text: str, core: str) -> None:
    assert read(plain(text)).core == core


@pytest.mark.parametrize(
    ("reference", "answer"),
    [("8", r"\frac{8}{1} dozens"), ("1/2", "1/2 million"), ("1/2000000", "1/2 million"), ("2^3000000", "2^3 million")],
)
def test_what_is_not_scaled_is_no_value(reference: str, answer: str) -> None:
    assert attempts(reference, answer, _ALL) == ()


@pytest.mark.parametrize(
    "word",
    [
        *(
            "twos",
            "sixes",
            "tens",
            "twenties",
            "zeros",
            "lakhs",
            "crores",
            "quintillions",
            "googols",
            "dozens",
            "halves",
        ),
        *(
            "quarters",
            "thirds",
            "fifths",
            "hundredths",
            "doubles",
            "squares",
            "cubes",
            "reciprocals",
            "powers",
            "minus",
        ),
        *("plus", "others", "exceptions", "wrongs", "negatives", "inverses", "roots", "logs"),
    ],
)
def test_a_word_that_changes_the_number_is_no_unit(word: str) -> None:
    assert split_unit(f"5 {word}") == (f"5 {word}", None)


@pytest.mark.parametrize("word", ["apples", "people", "months", "paths", "square feet", "cubic inches", "seconds"])
def test_a_noun_is_a_unit(word: str) -> None:
    assert split_unit(f"5 {word}")[0] == "5"


@pytest.mark.parametrize("answer", [r"\phantom{5}", r"\hphantom{5}", "(5,)"])
def test_what_shows_nothing_or_is_a_tuple_is_no_number(answer: str) -> None:
    assert attempts("5", answer, _ALL) == ()


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"\boxed{B: x, or C}", None),
        (r"\boxed{B: maybe D}", None),
        (r"\boxed{B.} The answer is C", "C"),
        (r"\boxed{B}. Answer: B", "B"),
        (r"The answer is \boxed{B}.", "B"),
        (r"\boxed{B}, as option C is wrong", "B"),
        (r"\boxed{D. Both A and B}", "D"),
    ],
)
def test_the_last_choice_counts_unless_it_is_hedged(text: str, letter: str | None) -> None:
    assert choice(text) == letter
