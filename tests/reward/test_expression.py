"""The reward expression."""

import pytest

from penstock.shared.errors import PermanentError, SettingsError
from penstock.shared.expression import Expression

NAMES = ["answer", "format"]


@pytest.mark.parametrize(
    ("text", "answer", "form", "reward"),
    [
        ("", 1.0, 0.5, 0.75),
        ("answer", 1.0, 0.0, 1.0),
        ("0.5 * answer + 0.25 * format", 1.0, 1.0, 0.75),
        ("0.5 * answer\n  + 0.25 * format", 1.0, 1.0, 0.75),
        ("answer - format * 2 / 4", 1.0, 1.0, 0.5),
        ("-answer", 1.0, 0.0, -1.0),
        ("+(answer)", 1.0, 0.0, 1.0),
        ("answer if format > 0 else 0", 1.0, 0.5, 1.0),
        ("answer if format > 0 else 0", 1.0, 0.0, 0.0),
        ("answer > 0.5", 1.0, 0.0, 1.0),
        ("0 < format <= 0.5", 0.0, 0.5, 1.0),
        ("0 < format < 0.5", 0.0, 0.5, 0.0),
        ("answer == format", 1.0, 1.0, 1.0),
        ("answer != format", 1.0, 1.0, 0.0),
        ("answer and format", 1.0, 0.5, 0.5),
        ("answer and format", 0.0, 0.5, 0.0),
        ("answer or format", 0.0, 0.5, 0.5),
        ("not answer", 0.0, 0.0, 1.0),
        ("min(answer, format)", 1.0, 0.5, 0.5),
        ("max(answer, format, 2)", 1.0, 0.5, 2.0),
        ("1e2 * answer", 1.0, 0.0, 100.0),
        ("answer / format if format else -1", 1.0, 0.0, -1.0),
    ],
)
def test_it_reads_as_python_does(text: str, answer: float, form: float, reward: float) -> None:
    assert Expression(text, NAMES)({"answer": answer, "format": form}) == reward


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0.9 * anser", "expected the name of a scorer (answer, format) in reward.expression, found 'anser' at character 7"),
        ("answer +", "expected an expression in reward.expression, found invalid syntax at character 9"),
        ("__import__('os').system('true')", "found \"__import__('os').system('true')\" at character 1"),
        ("__import__('os')", "found \"__import__('os')\" at character 1"),
        ("answer.__class__", "found 'answer.__class__' at character 1"),
        ("10**10**10", "found '10**10**10' at character 1"),
        ("answer * 2 ** 3", "found '2 ** 3' at character 10"),
        ("answer // 2", "found 'answer // 2'"),
        ("answer if 'x' else 0", "found \"'x'\" at character 11"),
        ("True", "found 'True'"),
        ("None", "found 'None'"),
        ("1j", "found '1j'"),
        ("[answer][0]", "found '[answer][0]'"),
        ("(lambda: 1)()", "at character 1"),
        ("[x for x in (1,)]", "at character 1"),
        ("f'{answer}'", "at character 1"),
        ("(answer := 1)", "at character 2"),
        ("min(answer)", "found 'min(answer)'"),
        ("min(*answer, 1)", "found '*answer'"),
        ("max(answer, 1, key=abs)", "found 'max(answer, 1, key=abs)'"),
        ("abs(answer)", "found 'abs(answer)'"),
        ("min", "found 'min'"),
        ("answer in (1, 2)", "at character 11"),
        ("answer is 1", "expected "),
        ("~answer", "found '~answer'"),
        ("1e999", "expected finite numbers"),
        ("9" * 400, "expected finite numbers"),
        ("answer; answer", "expected an expression"),
        ("answer = 1", "expected an expression"),
        ("answer\0", "expected an expression"),
        ("(" * 300 + "1" + ")" * 300, "expected an expression"),
        ("-" * 900 + "1", "nested"),
        ("+".join(["1"] * 300), "expected an expression nested at most 100 deep"),
        ("answer + " * 1000 + "1", "expected at most 1000 characters"),
    ],
)  # fmt: skip
def test_whatever_else_is_refused_before_it_runs(text: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=r"change reward\.expression") as caught:
        Expression(text, NAMES)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text", ["1 / answer", "1e300 * 1e300 * format", "1e39 * format", "1e308*10*answer*1e308*format"]
)
def test_a_reward_that_is_no_finite_number_is_never_handed_on(text: str) -> None:
    expression = Expression(text, NAMES)
    with pytest.raises(PermanentError, match=r"expected a finite reward .*change reward\.expression"):
        expression({"answer": 0.0, "format": 1.0})


def test_a_value_that_is_not_a_number_is_never_handed_on() -> None:
    with pytest.raises(PermanentError, match="found nan"):
        Expression("", NAMES)({"answer": float("nan"), "format": 1.0})


@pytest.mark.parametrize(
    ("text", "values", "reward"),
    [
        ("", {"format": 0.5}, 0.5),
        ("format if applies(format) else answer", {"answer": 1.0}, 1.0),
        ("applies(answer) + 2 * applies(format)", {"format": 0.0}, 2.0),
        ("first(format, answer)", {"answer": 0.25}, 0.25),
        ("first(format, answer)", {"answer": 0.25, "format": 0.75}, 0.75),
        ("not applies(answer) or answer", {"format": 0.0}, 1.0),
    ],
)
def test_a_scorer_that_does_not_apply_is_missing_not_0(text: str, values: dict[str, float], reward: float) -> None:
    assert Expression(text, NAMES)(values) == reward


@pytest.mark.parametrize("text", ["answer + format", "first(format, format)", "min(format, 1)"])
def test_an_expression_that_needs_what_is_missing_makes_no_reward(text: str) -> None:
    with pytest.raises(PermanentError, match=r"expected scorer 'format' to apply, as .* needs its value, found answer"):
        Expression(text, NAMES)({"answer": 1.0})


@pytest.mark.parametrize(
    "text", ["applies(1)", "applies(anser)", "first(answer)", "first(answer, 1)", "applies(answer, format)"]
)
def test_only_names_of_scorers_apply(text: str) -> None:
    with pytest.raises(SettingsError, match=r"change reward\.expression"):
        Expression(text, NAMES)
