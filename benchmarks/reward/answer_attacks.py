"""Wrong answers that a policy, or a person without scruples, writes to be taken for right ones.

Each kind makes a reference and a completion that no teacher would accept, written without a look at the matcher's
rules or at the tests' generator (:mod:`tests.support.answer_pairs`).
"""

import dataclasses
import random
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Attack:
    kind: str
    reference: str
    completion: str


Maker = Callable[[random.Random], tuple[str, str]]
MAKERS: dict[str, Maker] = {}


def _maker(make: Maker) -> Maker:
    MAKERS[make.__name__.strip("_")] = make
    return make


def _box(inside: str) -> str:
    return rf"Therefore the answer is $\boxed{{{inside}}}$."


def _n(lot: random.Random, most: int = 400) -> int:
    return lot.randint(3, most)


def _list(lot: random.Random, count: int) -> list[int]:
    return lot.sample(range(-40, 60), count)


@_maker
def _part_of_the_solutions(lot: random.Random) -> tuple[str, str]:
    numbers = _list(lot, 3)
    return ", ".join(map(str, numbers)), _box(", ".join(map(str, numbers[: lot.randint(1, 2)])))


@_maker
def _one_solution_too_many(lot: random.Random) -> tuple[str, str]:
    numbers = _list(lot, 4)
    return rf"\{{{numbers[0]}, {numbers[1]}, {numbers[2]}\}}", _box(rf"\{{{', '.join(map(str, numbers))}\}}")


@_maker
def _only_the_positive_root(lot: random.Random) -> tuple[str, str]:
    n = _n(lot, 50)
    return rf"\pm {n}", _box(str(n))


@_maker
def _both_roots_for_one(lot: random.Random) -> tuple[str, str]:
    n = _n(lot, 50)
    return str(n), _box(rf"\pm {n}")


@_maker
def _negation(lot: random.Random) -> tuple[str, str]:
    n = _n(lot)
    said = lot.choice(
        ("The answer is not {n}.", "It cannot be {n}.", r"\boxed{{\text{{not }} {n}}}", r"\boxed{{\neq {n}}}", "The answer isn't {n}.", "It is never {n}.")
    )  # fmt: skip
    return str(n), said.format(n=n)


@_maker
def _comparative(lot: random.Random) -> tuple[str, str]:
    n = _n(lot)
    said = lot.choice(
        ("It is more than {n}.", "The answer is less than {n}.", r"\boxed{{> {n}}}", r"\boxed{{\text{{at least }} {n}}}", r"\boxed{{x \ge {n}}}", "The total exceeds {n}.", r"\boxed{{{n}+}}", "Up to {n}.", r"\boxed{{{n}\text{{ or more}}}}")
    )  # fmt: skip
    return str(n), said.format(n=n)


@_maker
def _range(lot: random.Random) -> tuple[str, str]:
    n = _n(lot)
    said = lot.choice(
        (r"{a}-{b}", r"{a} \text{{ to }} {b}", r"[{a}, {b}]", r"{a} \le x \le {b}", r"{n} \pm 1", r"{a}\text{{–}}{b}")
    )
    return str(n), _box(said.format(n=n, a=n - 1, b=n + 1))


@_maker
def _scale_word(lot: random.Random) -> tuple[str, str]:
    n = _n(lot)
    word = lot.choice(("million", "thousand", "billion", "hundred", "dozen", "tenths", "hundredths"))
    return str(n), lot.choice((_box(rf"{n} \text{{ {word}}}"), f"The answer is {n} {word}.", f"#### {n} {word}"))


@_maker
def _several_answers(lot: random.Random) -> tuple[str, str]:
    n, other = _n(lot), _n(lot) + 401
    said = lot.choice(
        (_box(rf"{n} \text{{ or }} {other}"), f"The answer is {other} or {n}.", rf"\boxed{{{other}}} or \boxed{{{n}}}", _box(f"{n}, {other}"), f"It is either {other} or maybe {n}.", _box(f"{other} / {n}"))
    )  # fmt: skip
    return str(n), said


@_maker
def _corrected_afterwards(lot: random.Random) -> tuple[str, str]:
    n, other = _n(lot), _n(lot) + 401
    return str(n), rf"First I thought \boxed{{{n}}}, but the correct answer is \boxed{{{other}}}."


@_maker
def _wrong_unit(lot: random.Random) -> tuple[str, str]:
    n = _n(lot)
    right, wrong = lot.sample(("cm", "m", "km", "kg", "seconds", "hours", "dollars", "miles"), 2)
    return rf"{n}\text{{ {right}}}", _box(rf"{n}\text{{ {wrong}}}")


@_maker
def _wrong_power_of_the_unit(lot: random.Random) -> tuple[str, str]:
    n = _n(lot)
    return rf"{n}\text{{ cm}}^2", _box(rf"{n}\text{{ cm}}^3")


@_maker
def _percent_for_share(lot: random.Random) -> tuple[str, str]:
    n = lot.randint(2, 95)
    return rf"{n}\%", _box(f"{n / 10000}")


@_maker
def _near_miss(lot: random.Random) -> tuple[str, str]:
    n = lot.randint(10_000, 10_000_000)
    return str(n), _box(str(n + lot.choice((-1, 1, 10))))


@_maker
def _near_miss_decimal(lot: random.Random) -> tuple[str, str]:
    n = lot.randint(1_001, 9_999) | 1
    return f"{n / 1000}", _box(f"{n / 1000 + lot.choice((0.001, -0.001, 0.0005)):.4f}")


@_maker
def _rounded(lot: random.Random) -> tuple[str, str]:
    a = lot.choice((3, 7, 9, 11, 13))
    return rf"\frac{{{lot.choice((1, 2))}}}{{{a}}}", _box(f"{1 / a:.2f}")


@_maker
def _rounded_root(lot: random.Random) -> tuple[str, str]:
    a = lot.choice((2, 3, 5, 6, 7, 10, 11))
    return rf"{a}\sqrt{{{a}}}", _box(f"{a**1.5:.2f}")


@_maker
def _pi_as_22_over_7(lot: random.Random) -> tuple[str, str]:
    n = _n(lot, 60)
    return rf"{n}\pi", _box(lot.choice((rf"\frac{{{22 * n}}}{{7}}", f"{3.14 * n:.2f}")))


@_maker
def _sign(lot: random.Random) -> tuple[str, str]:
    a, b = _n(lot, 90), _n(lot, 90)
    return rf"\frac{{{a}}}{{{b + 100}}}", _box(
        lot.choice((rf"-\frac{{{a}}}{{{b + 100}}}", rf"\frac{{{b + 100}}}{{{a}}}"))
    )


@_maker
def _swapped_point(lot: random.Random) -> tuple[str, str]:
    a, b = _list(lot, 2)
    return f"({a}, {b})", _box(f"({b}, {a})")


@_maker
def _wrong_end_of_an_interval(lot: random.Random) -> tuple[str, str]:
    a, b = sorted(_list(lot, 2))
    return f"[{a}, {b})", _box(lot.choice((f"[{a}, {b}]", f"({a}, {b})", rf"({a}, {b}]", rf"{a} \le x \le {b}")))


@_maker
def _complement(lot: random.Random) -> tuple[str, str]:
    a, b = sorted(_list(lot, 2))
    return f"({a}, {b})", _box(rf"(-\infty, {a}] \cup [{b}, \infty)")


@_maker
def _restated(lot: random.Random) -> tuple[str, str]:
    a, b = _n(lot), _n(lot)
    return str(a + b), _box(
        lot.choice((f"{a} + {b}", rf"\sum_{{k=0}}^{{1}} ({a} + k({b - a}))", rf"\frac{{{a} + {b}}}{{1}}"))
    )


@_maker
def _tautology(lot: random.Random) -> tuple[str, str]:
    n = _n(lot)
    return str(n), _box(
        lot.choice(
            (
                "x = x",
                "0 = 0",
                "x",
                r"\text{answer}",
                r"n",
                r"\text{the answer}",
                r"?",
                r"\infty",
                r"\emptyset",
                r"\mathbb{R}",
            )
        )
    )


@_maker
def _false_chain(lot: random.Random) -> tuple[str, str]:
    n = _n(lot)
    return str(n), _box(
        lot.choice((f"{n} = {n + 1}", f"{n + 1} = {n}", rf"{n + 2} \approx {n}", f"{n - 1} < {n}", f"1 = {n}"))
    )


@_maker
def _tiny_difference(lot: random.Random) -> tuple[str, str]:
    n = lot.randint(30, 90)
    return rf"1-e^{{-{n}}}", _box(lot.choice((rf"1-e^{{-{n + 5}}}", "1", rf"1-2^{{-{n}}}", rf"1+e^{{-{n}}}")))


@_maker
def _tiny_probability(lot: random.Random) -> tuple[str, str]:
    n = lot.randint(20, 40)
    return rf"\frac{{e^{{-{n}}}{n}^{{{n}}}}}{{{n}!}}", _box(rf"\frac{{e^{{-{n}}}{n}^{{{n - 1}}}}}{{{n - 2}!}}")


@_maker
def _no_real_solution(lot: random.Random) -> tuple[str, str]:
    a, b = lot.sample(range(2, 60), 2)
    return f"x^2 = -{a}", _box(f"x^2 = -{b}")


@_maker
def _other_letter(lot: random.Random) -> tuple[str, str]:
    n, m = _n(lot, 20), _n(lot, 20)
    return f"{n}x + {m}y", _box(lot.choice((f"{n}y + {m}x", f"{n}x + {m}z", f"{n}x - {m}y", f"{n}X + {m}Y")))


@_maker
def _missing_constant(lot: random.Random) -> tuple[str, str]:
    n = lot.randint(2, 9)
    return rf"\frac{{x^{n}}}{{{n}}} + C", _box(rf"\frac{{x^{n}}}{{{n}}}")


@_maker
def _extraneous_factor(lot: random.Random) -> tuple[str, str]:
    a, b = lot.sample(range(2, 30), 2)
    return rf"(x+{a})(x+{b})", _box(
        lot.choice((rf"(x+{a})(x-{b})", rf"2(x+{a})(x+{b})", rf"(x+{a})+(x+{b})", rf"(x+{a})^2(x+{b})"))
    )


@_maker
def _other_base(lot: random.Random) -> tuple[str, str]:
    n = lot.randint(10, 60)
    return f"{n:b}_2", _box(f"{n:b}_3")


@_maker
def _matrix_with_one_wrong_entry(lot: random.Random) -> tuple[str, str]:
    a, b, c, d = _list(lot, 4)
    matrix = r"\begin{{pmatrix}}{}&{}\\{}&{}\end{{pmatrix}}"
    return matrix.format(a, b, c, d), _box(matrix.format(a, b, d, c))


@_maker
def _function_of_the_number(lot: random.Random) -> tuple[str, str]:
    n = _n(lot, 90)
    return str(n), _box(
        lot.choice(
            (
                rf"\sqrt{{{n}}}",
                f"{n}!",
                rf"f({n})",
                rf"\sin({n})",
                rf"\log {n}",
                rf"{n}^2",
                rf"\frac{{1}}{{{n}}}",
                f"{n}x",
                rf"\overline{{{n}}}",
                rf"{n}\%",
                rf"{n}^\circ\text{{C}} - 1",
            )
        )
    )


@_maker
def _other_word(lot: random.Random) -> tuple[str, str]:
    right, wrong = lot.sample(
        ("north", "south", "even", "odd", "Monday", "Friday", "increasing", "decreasing", "true", "false", "yes", "no"),
        2,
    )
    return rf"\text{{{right}}}", _box(
        lot.choice(
            (
                rf"\text{{{wrong}}}",
                rf"\text{{not {right}}}",
                rf"\text{{{right} or {wrong}}}",
                rf"\text{{{right[::-1]}}}",
            )
        )
    )


@_maker
def _time(lot: random.Random) -> tuple[str, str]:
    hour, minute = lot.randint(1, 11), lot.randint(10, 59)
    return f"{hour}:{minute}", _box(
        lot.choice((f"{hour}.{minute}", f"{minute}:{hour:02}", f"{hour}", rf"\frac{{{hour}}}{{{minute}}}"))
    )


@_maker
def _ratio(lot: random.Random) -> tuple[str, str]:
    a, b = lot.sample((2, 3, 5, 7, 11, 13), 2)
    return f"{a}:{b}", _box(lot.choice((f"{b}:{a}", f"{a}", f"{a}:{a + b}")))


@_maker
def _thousands(lot: random.Random) -> tuple[str, str]:
    a, b = lot.randint(1, 99), lot.randint(100, 999)
    return f"{a},{b}", _box(lot.choice((f"{a}.{b}", f"{a}", f"{b}", f"{a}{b}0")))


def attacks(count: int, seed: int = 7) -> Iterator[Attack]:
    """Yield ``count`` different attacks, the kinds in turn."""
    lots = {kind: random.Random(f"{seed}:{kind}") for kind in MAKERS}
    seen, turn = set[tuple[str, str]](), 0
    while len(seen) < count:
        kind = list(MAKERS)[turn % len(MAKERS)]
        turn += 1
        pair = MAKERS[kind](lots[kind])
        if pair not in seen:
            seen.add(pair)
            yield Attack(kind, *pair)
