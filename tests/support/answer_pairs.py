"""Generated answers and references with their verdicts: equivalent forms and near misses.

    python -m tests.support.answer_pairs --seed 1 --each 20

Verdicts follow from how a rule makes a pair, not from a matcher.
"""

import argparse
import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from fractions import Fraction

EACH = 12
"""Pairs of each rule in the tests' corpus."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    rule: str
    reference: str
    answer: str
    equal: bool


Rule = Callable[[random.Random], tuple[str, str]]
EQUAL: dict[str, Rule] = {}
UNEQUAL: dict[str, Rule] = {}


def _equal(rule: Rule) -> Rule:
    EQUAL[rule.__name__.strip("_")] = rule
    return rule


def _unequal(rule: Rule) -> Rule:
    UNEQUAL[rule.__name__.strip("_")] = rule
    return rule


def _whole(lot: random.Random) -> int:
    return lot.randint(2, 9_999)


def _small(lot: random.Random) -> int:
    return lot.randint(2, 12)


def _reduced(lot: random.Random) -> Fraction:
    while True:
        fraction = Fraction(lot.randint(1, 60), lot.randint(2, 40))
        if fraction.denominator > 1:
            return fraction


def _latex(fraction: Fraction) -> str:
    sign = "-" if fraction < 0 else ""
    return rf"{sign}\frac{{{abs(fraction.numerator)}}}{{{fraction.denominator}}}"


def _word(lot: random.Random) -> str:
    return lot.choice(
        ("triangle", "north", "Wednesday", "decreasing", "rhombus", "purple", "Oslo", "converges", "parallel")
    )


# --- whole numbers


@_equal
def _thousands_with_commas(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(1_000, 99_999_999)
    return f"{number}", f"{number:,}"


@_equal
def _thousands_with_thin_spaces(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(1_000, 99_999_999)
    return f"{number}", f"{number:,}".replace(",", r"\,")


@_equal
def _thousands_with_latex_commas(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(1_000, 99_999_999)
    return f"{number:,}".replace(",", "{,}"), f"{number}"


@_equal
def _zero_fraction(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    return f"{number}", f"{number}.00"


@_equal
def _dressed_number(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    dress = lot.choice(
        (
            "${}$",
            r"\({}\)",
            "**{}**",
            r"\mathbf{{{}}}",
            r"\text{{{}}}",
            "{}.",
            "({})",
            r"\displaystyle {}",
            "+{}",
            "= {}",
        )
    )
    return f"{number}", dress.format(number)


@_equal
def _full_width(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    return f"{number}", f"{number}".translate(str.maketrans("0123456789", "０１２３４５６７８９"))


@_equal
def _devanagari_digits(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    return f"{number}", f"{number}".translate(str.maketrans("0123456789", "०१२३४५६७८९"))


@_equal
def _dashes_for_minus(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    return f"-{number}", f"{lot.choice('–−－')}{number}"


@_equal
def _number_words(lot: random.Random) -> tuple[str, str]:
    tens, ones = (
        lot.choice(((20, "twenty"), (30, "thirty"), (70, "seventy"))),
        lot.choice(((1, "one"), (6, "six"), (9, "nine"))),
    )
    return f"{tens[0] + ones[0]}", f"{tens[1]}-{ones[1]}"


@_equal
def _scientific(lot: random.Random) -> tuple[str, str]:
    mantissa, power = lot.randint(11, 99), lot.randint(3, 12)
    form = lot.choice((r"{}.{} \times 10^{{{}}}", r"{}.{}\cdot 10^{{{}}}", "{}.{}e{}", "{}.{}*10^{{{}}}"))
    return f"{mantissa * 10 ** (power - 1)}", form.format(mantissa // 10, mantissa % 10, power)


@_equal
def _power_worked_out(lot: random.Random) -> tuple[str, str]:
    base, power = lot.randint(2, 9), lot.randint(2, 6)
    return f"{base}^{{{power}}}", f"{base**power}"


@_unequal
def _one_more(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(10, 10**9)
    return f"{number}", f"{number + lot.choice((-1, 1))}"


@_unequal
def _one_more_as_decimal(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(10**6, 10**12)
    return f"{number}", f"{number + 1}.0"


@_unequal
def _rounded_exponent(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(10**9, 10**12) * 10 + 3
    return f"{number}", f"{number:.7e}"


@_unequal
def _other_sign(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    return f"{number}", f"{lot.choice('-–−')}{number}"


@_unequal
def _decimal_comma_misplaced(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(1_000, 9_999)
    return f"{number}", f"{number // 100},{number % 100:02d}"


@_unequal
def _digits_swapped(lot: random.Random) -> tuple[str, str]:
    tens, ones = lot.sample(range(1, 10), 2)
    return f"{tens}{ones}", f"{ones}{tens}"


@_unequal
def _power_misread(lot: random.Random) -> tuple[str, str]:
    base, power = lot.randint(3, 9), lot.randint(3, 6)
    return f"{base}^{{{power}}}", f"{base * power}"


@_unequal
def _off_by_ten(lot: random.Random) -> tuple[str, str]:
    mantissa, power = lot.randint(1, 9), lot.randint(3, 9)
    return f"{mantissa * 10**power}", rf"{mantissa} \times 10^{{{power + 1}}}"


@_unequal
def _factorial_dropped(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(3, 8)
    return f"{number}!", f"{number}"


# --- fractions and decimals


@_equal
def _fraction_not_reduced(lot: random.Random) -> tuple[str, str]:
    fraction, factor = _reduced(lot), _small(lot)
    return _latex(fraction), rf"\dfrac{{{fraction.numerator * factor}}}{{{fraction.denominator * factor}}}"


@_equal
def _fraction_with_slash(lot: random.Random) -> tuple[str, str]:
    fraction = _reduced(lot)
    return _latex(fraction), f"{fraction.numerator}/{fraction.denominator}"


@_equal
def _fraction_of_negatives(lot: random.Random) -> tuple[str, str]:
    fraction = _reduced(lot)
    return _latex(fraction), rf"\frac{{-{fraction.numerator}}}{{-{fraction.denominator}}}"


@_equal
def _minus_in_the_numerator(lot: random.Random) -> tuple[str, str]:
    fraction = _reduced(lot)
    return _latex(-fraction), rf"\frac{{-{fraction.numerator}}}{{{fraction.denominator}}}"


@_equal
def _mixed_number(lot: random.Random) -> tuple[str, str]:
    whole, below = _small(lot), lot.randint(3, 12)
    fraction = Fraction(1, below)
    form = lot.choice((r"{0}\frac{{1}}{{{1}}}", "{0} 1/{1}", r"{0} \dfrac{{1}}{{{1}}}"))
    return _latex(whole + fraction), form.format(whole, below)


@_equal
def _terminating_decimal(lot: random.Random) -> tuple[str, str]:
    fraction = Fraction(lot.randint(1, 999) * 2 + 1, lot.choice((8, 16, 40, 125)))
    return _latex(fraction), f"{float(fraction)!r}"


@_equal
def _repeating_decimal(lot: random.Random) -> tuple[str, str]:
    digit = lot.choice((1, 2, 4, 5, 7, 8))
    form = lot.choice((r"0.\overline{{{}}}", r"0.\bar{{{}}}", r"0.\dot{{{}}}"))
    return _latex(Fraction(digit, 9)), form.format(digit)


@_equal
def _trailing_zeros(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(1, 999)
    return f"{number}.25", f"{number}.2500"


@_unequal
def _fraction_upside_down(lot: random.Random) -> tuple[str, str]:
    fraction = _reduced(lot)
    while fraction.numerator == fraction.denominator or fraction.numerator == 1:
        fraction = _reduced(lot)
    return _latex(fraction), rf"\frac{{{fraction.denominator}}}{{{fraction.numerator}}}"


@_unequal
def _fraction_near(lot: random.Random) -> tuple[str, str]:
    fraction = _reduced(lot)
    return _latex(fraction), rf"\frac{{{fraction.numerator * 7 + 1}}}{{{fraction.denominator * 7}}}"


@_unequal
def _rounded_too_much(lot: random.Random) -> tuple[str, str]:
    below = lot.choice((3, 7, 9, 11, 13))
    return _latex(Fraction(1, below)), f"{1 / below:.3f}"


@_unequal
def _whole_part_lost(lot: random.Random) -> tuple[str, str]:
    whole, below = _small(lot), lot.randint(3, 12)
    return rf"{whole}\frac{{1}}{{{below}}}", rf"\frac{{1}}{{{below}}}"


@_unequal
def _decimal_point_moved(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(101, 999)
    return f"{number / 100}", f"{number / 10}"


@_unequal
def _repeating_taken_for_finite(lot: random.Random) -> tuple[str, str]:
    digit = lot.randint(1, 8)
    return rf"0.\overline{{{digit}}}", f"0.{digit}"


# --- percent, units, money, degrees, bases, times, dates, ratios


@_equal
def _percent_as_decimal(lot: random.Random) -> tuple[str, str]:
    percent = lot.randint(1, 99)
    return rf"{percent}\%", f"{percent / 100}"


@_equal
def _percent_in_words(lot: random.Random) -> tuple[str, str]:
    percent = lot.randint(1, 99)
    return rf"{percent}\%", lot.choice((f"{percent} percent", rf"{percent}\text{{ percent}}", f"{percent}%"))


@_unequal
def _percent_sign_dropped(lot: random.Random) -> tuple[str, str]:
    percent = lot.randint(1, 99)
    return rf"{percent}\%", f"{percent}"


@_unequal
def _percent_sign_added(lot: random.Random) -> tuple[str, str]:
    share = lot.randint(1, 99) / 100
    return f"{share}", rf"{share}\%"


@_unequal
def _percent_of_percent(lot: random.Random) -> tuple[str, str]:
    percent = lot.randint(2, 99)
    return rf"{percent}\%", f"{percent / 10_000:.4f}"


@_equal
def _length_converted(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    small, large, factor = lot.choice(
        (("cm", "m", 100), ("mm", "cm", 10), ("m", "km", 1000), ("g", "kg", 1000), ("inches", "feet", 12))
    )
    return f"{number} {large}", rf"{number * factor}\text{{ {small}}}"


@_equal
def _unit_written_otherwise(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    first, second = lot.choice(
        (
            (r"\text{ cm}^2", r"\text{ square centimeters}"), (r"\text{ m}^3", " cubic meters"), (r"\,\mathrm{km/h}", " km/h"),
            (" hours", r"\text{ hr}"), (" minutes", r"\text{ min}"), (" apples", r"\text{ apples}"), (" miles per hour", " mph"),
        )
    )  # fmt: skip
    return f"{number}{first}", f"{number}{second}"


@_equal
def _money(lot: random.Random) -> tuple[str, str]:
    dollars = _whole(lot)
    form = lot.choice((r"\${}", "{} dollars", "${}.00", r"{}\text{{ dollars}}"))
    return rf"\${dollars}", form.format(dollars)


@_equal
def _other_currency(lot: random.Random) -> tuple[str, str]:
    amount = _whole(lot)
    return f"€{amount}", lot.choice((f"{amount} euros", f"{amount}€", rf"{amount}\text{{ euros}}"))


@_unequal
def _other_unit(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    first, second = lot.choice(
        (
            ("cm", "km"),
            ("m", "cm"),
            ("kg", "g"),
            ("hours", "minutes"),
            ("apples", "pears"),
            ("m", "s"),
            ("cm^2", "cm^3"),
        )
    )
    return f"{number} {first}", f"{number} {second}"


@_unequal
def _unit_dropped(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    return rf"{number}\text{{ {lot.choice(('cm', 'kg', 'hours', 'marbles'))}}}", f"{number}"


@_equal
def _unit_added(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    return f"{number}", f"{number} {lot.choice(('cm', 'km/h', 'dollars', 'students'))}"


@_unequal
def _currency_changed(lot: random.Random) -> tuple[str, str]:
    amount = _whole(lot)
    return rf"\${amount}", lot.choice((f"€{amount}", f"{amount} pounds", f"£{amount}", f"{amount} cents"))


@_equal
def _degrees(lot: random.Random) -> tuple[str, str]:
    angle = lot.randint(1, 359)
    form = lot.choice((r"{}^{{\circ}}", "{}°", "{} degrees", r"{}\text{{ degrees}}", r"{}\degree"))
    return rf"{angle}^\circ", form.format(angle)


@_equal
def _degrees_in_radians(lot: random.Random) -> tuple[str, str]:
    angle = lot.choice((30, 45, 60, 90, 120, 135, 150, 270))
    fraction = Fraction(angle, 180)
    above = r"\pi" if fraction.numerator == 1 else rf"{fraction.numerator}\pi"
    return rf"{angle}^\circ", rf"\frac{{{above}}}{{{fraction.denominator}}}"


@_unequal
def _other_angle(lot: random.Random) -> tuple[str, str]:
    angle = lot.randint(1, 179)
    return rf"{angle}^\circ", rf"{180 - angle + (angle == 90)}^\circ"


@_unequal
def _degrees_taken_for_radians(lot: random.Random) -> tuple[str, str]:
    angle = lot.choice((30, 45, 60, 90))
    return rf"{angle}^\circ", rf"\frac{{\pi}}{{{angle}}}"


@_equal
def _base(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(8, 500)
    return f"{number:b}_2", lot.choice(
        (f"{number:b}_{{2}}", rf"{number:b}_{{\text{{two}}}}", f"({number:b})_2", f"{number:b} base 2")
    )


@_equal
def _base_by_value(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(8, 500)
    return f"{number:o}_8", lot.choice((f"{number}", f"{number:X}_{{16}}"))


@_unequal
def _base_changed(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(8, 500)
    return f"{number:b}_2", f"{number:b}_{lot.choice((3, 4, 8))}"


@_unequal
def _base_dropped(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(8, 500)
    return f"{number:b}_2", f"{number:b}"


@_equal
def _time_of_day(lot: random.Random) -> tuple[str, str]:
    time = f"{lot.randint(1, 12)}:{lot.randint(10, 59)}"
    return f"{time}", rf"\text{{{time}}}"


@_unequal
def _other_time(lot: random.Random) -> tuple[str, str]:
    hour, minute = lot.randint(1, 11), lot.randint(10, 58)
    return f"{hour}:{minute}", lot.choice(
        (f"{hour}:{minute + 1}", f"{hour + 1}:{minute}", rf"\frac{{{hour}}}{{{minute}}}")
    )


@_unequal
def _half_of_the_day(lot: random.Random) -> tuple[str, str]:
    time = f"{lot.randint(1, 12)}:{lot.randint(10, 59)}"
    return f"{time} PM", f"{time} AM"


@_unequal
def _date_taken_for_arithmetic(lot: random.Random) -> tuple[str, str]:
    year, month, day = lot.randint(1900, 2030), lot.randint(10, 12), lot.randint(10, 28)
    return f"{year}-{month}-{day}", lot.choice((f"{year - month - day}", f"{year}-{month}-{day + 1}"))


@_equal
def _ratio(lot: random.Random) -> tuple[str, str]:
    first, second, factor = lot.randint(2, 9), lot.randint(2, 9), lot.randint(2, 5)
    return f"{first}:{second}", lot.choice(
        (f"{first * factor} : {second * factor}", rf"\frac{{{first}}}{{{second}}}", f"{first}/{second}")
    )


@_unequal
def _ratio_turned(lot: random.Random) -> tuple[str, str]:
    first, second = lot.sample(range(1, 10), 2)
    return f"{first}:{second}", f"{second}:{first}"


# --- roots, constants, complex numbers


@_equal
def _root_simplified(lot: random.Random) -> tuple[str, str]:
    outside, inside = lot.randint(2, 9), lot.choice((2, 3, 5, 7, 11))
    return rf"{outside}\sqrt{{{inside}}}", lot.choice(
        (rf"\sqrt{{{outside**2 * inside}}}", f"{outside}√{inside}", rf"{outside} \cdot \sqrt{{{inside}}}")
    )


@_equal
def _root_in_the_denominator(lot: random.Random) -> tuple[str, str]:
    inside = lot.choice((2, 3, 5, 7, 11, 13))
    return rf"\frac{{\sqrt{{{inside}}}}}{{{inside}}}", rf"\frac{{1}}{{\sqrt{{{inside}}}}}"


@_equal
def _sum_with_root_turned(lot: random.Random) -> tuple[str, str]:
    number, inside = _small(lot), lot.choice((2, 3, 5, 7))
    return rf"{number}+\sqrt{{{inside}}}", rf"\sqrt{{{inside}}} + {number}"


@_equal
def _multiple_of_pi(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(2, 99)
    return rf"{number}\pi", lot.choice((rf"\pi \cdot {number}", f"{number}π", rf"{number} \times \pi"))


@_equal
def _root_as_decimal(lot: random.Random) -> tuple[str, str]:
    number = lot.choice((2, 3, 5, 7, 11, 13))
    return rf"\sqrt{{{number}}}", f"{number**0.5:.9f}"


@_equal
def _complex_turned(lot: random.Random) -> tuple[str, str]:
    real, imaginary = _small(lot), _small(lot)
    return f"{real}+{imaginary}i", f"{imaginary}i + {real}"


@_unequal
def _root_of_another(lot: random.Random) -> tuple[str, str]:
    outside, inside = lot.randint(2, 9), lot.choice((2, 3, 5, 7, 11))
    return rf"{outside}\sqrt{{{inside}}}", lot.choice(
        (rf"{outside}\sqrt{{{inside + 1}}}", rf"\sqrt{{{outside * inside}}}", rf"{outside}{inside}")
    )


@_unequal
def _pi_rounded(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(1, 20)
    return rf"{number}\pi", lot.choice((f"{number * 3.14:.2f}", rf"\frac{{{22 * number}}}{{7}}", f"{number}"))


@_unequal
def _conjugate(lot: random.Random) -> tuple[str, str]:
    real, imaginary = _small(lot), _small(lot)
    return f"{real}+{imaginary}i", f"{real}-{imaginary}i"


@_unequal
def _logarithm_of_another(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(2, 9)
    return rf"\ln {number}", lot.choice((rf"\ln {number + 1}", rf"\log_2 {number + 2}", rf"{number}"))


@_equal
def _logarithm_of_a_power(lot: random.Random) -> tuple[str, str]:
    number, power = lot.choice((2, 3, 5, 7)), lot.randint(2, 4)
    return rf"\ln {number**power}", rf"{power}\ln {number}"


# --- polynomials, equations, inequalities


@_equal
def _factored(lot: random.Random) -> tuple[str, str]:
    a, b = lot.randint(1, 9), lot.randint(1, 9)
    return f"x^2+{a + b}x+{a * b}", f"(x+{a})(x+{b})"


@_equal
def _terms_turned(lot: random.Random) -> tuple[str, str]:
    a, b, c = lot.randint(2, 9), lot.randint(2, 9), lot.randint(2, 9)
    return f"{a}x^2+{b}x-{c}", f"-{c} + {b}x + {a}x^2"


@_equal
def _superscript(lot: random.Random) -> tuple[str, str]:
    a = lot.randint(2, 9)
    return f"{a}x^2+1", f"{a}x²+1"


@_equal
def _factors_turned(lot: random.Random) -> tuple[str, str]:
    a = lot.randint(2, 9)
    return f"{a}xy^2", f"{a}y^2x"


@_unequal
def _factored_wrongly(lot: random.Random) -> tuple[str, str]:
    a, b = lot.randint(1, 9), lot.randint(1, 9)
    return f"x^2+{a + b}x+{a * b}", f"(x+{a})(x+{b + 1})"


@_unequal
def _sign_of_a_term(lot: random.Random) -> tuple[str, str]:
    a, b = lot.randint(2, 9), lot.randint(2, 9)
    return f"{a}x+{b}", f"{a}x-{b}"


@_unequal
def _exponent_misread(lot: random.Random) -> tuple[str, str]:
    a = lot.randint(2, 9)
    return f"x^{a}", f"{a}x"


@_unequal
def _other_letter(lot: random.Random) -> tuple[str, str]:
    a, b = lot.randint(2, 9), lot.randint(2, 9)
    return f"{a}x+{b}", lot.choice((f"{a}y+{b}", f"{a}X+{b}"))


@_equal
def _named_value(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    return f"{number}", lot.choice((f"x = {number}", f"n={number}", rf"\theta = {number}", f"x_1 = {number}"))


@_equal
def _name_left_out(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    return f"x = {number}", f"{number}"


@_equal
def _function_named(lot: random.Random) -> tuple[str, str]:
    a, b = lot.randint(2, 9), lot.randint(2, 9)
    return f"{a}x+{b}", lot.choice((f"y={a}x+{b}", f"f(x) = {b} + {a}x"))


@_equal
def _line_rearranged(lot: random.Random) -> tuple[str, str]:
    a, b = lot.randint(2, 9), lot.randint(2, 9)
    return f"y={a}x+{b}", lot.choice((f"y-{a}x={b}", f"{a}x-y+{b}=0", f"{a}x + {b} = y"))


@_unequal
def _other_name(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    return f"x = {number}", f"y = {number}"


@_unequal
def _false_equation(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    return f"{number}", lot.choice(
        (
            f"{number + 1} = {number}",
            f"{number} = {number + 1}",
            f"x = {number + 1} = {number}",
            rf"{number + 2} \approx {number}",
        )
    )


@_unequal
def _relation_for_a_value(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    return f"{number}", lot.choice(
        (f"> {number}", rf"\neq {number}", rf"\leq {number}", f"x > {number}", rf"x \neq {number}", f"< {number}")
    )


@_unequal
def _other_line(lot: random.Random) -> tuple[str, str]:
    a, b = lot.randint(2, 9), lot.randint(2, 9)
    return f"y={a}x+{b}", lot.choice((f"y={a}x-{b}", f"y={a + 1}x+{b}", f"x={a}y+{b}"))


@_equal
def _inequality_turned(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    return f"x > {number}", lot.choice((f"{number} < x", rf"({number}, \infty)", f"x>{number}"))


@_equal
def _double_inequality(lot: random.Random) -> tuple[str, str]:
    a = lot.randint(1, 99)
    return rf"[{a}, {a + 5})", lot.choice(
        (rf"{a} \leq x < {a + 5}", rf"x \in [{a}, {a + 5})", rf"{a + 5} > x \geq {a}")
    )


@_equal
def _two_regions(lot: random.Random) -> tuple[str, str]:
    a = lot.randint(1, 99)
    return rf"(-\infty, {a}) \cup ({a + 3}, \infty)", lot.choice(
        (rf"x < {a} \text{{ or }} x > {a + 3}", rf"x > {a + 3} or x < {a}")
    )


@_unequal
def _inequality_weakened(lot: random.Random) -> tuple[str, str]:
    number = _whole(lot)
    return f"x > {number}", lot.choice(
        (rf"x \geq {number}", f"x < {number}", rf"[{number}, \infty)", f"y > {number}", f"x > {number + 1}")
    )


# --- intervals, sets, tuples, lists, matrices


@_equal
def _interval_dressed(lot: random.Random) -> tuple[str, str]:
    a, b = lot.randint(-20, 0), lot.randint(1, 20)
    return f"[{a},{b})", rf"\left[{a}, {b}\right)"


@_equal
def _union_turned(lot: random.Random) -> tuple[str, str]:
    a = lot.randint(1, 20)
    return rf"[{a},{a + 1}] \cup [{a + 3},{a + 4}]", rf"[{a + 3},{a + 4}] ∪ [{a},{a + 1}]"


@_unequal
def _interval_opened(lot: random.Random) -> tuple[str, str]:
    a, b = lot.randint(-20, 0), lot.randint(1, 20)
    return f"[{a},{b})", lot.choice((f"({a},{b})", f"[{a},{b}]", f"({a},{b}]", f"[{a},{b + 1})"))


@_unequal
def _brackets_changed(lot: random.Random) -> tuple[str, str]:
    a = lot.randint(1, 20)
    return f"({a},{a + 3})", lot.choice((rf"\{{{a},{a + 3}\}}", f"{a}, {a + 3}", f"[{a},{a + 3}]", f"({a + 3},{a})"))


@_equal
def _set_in_another_order(lot: random.Random) -> tuple[str, str]:
    members = lot.sample(range(-30, 60), 4)
    other = lot.sample(members, 4)
    form = lot.choice((r"\{{{}\}}", r"\left\{{{}\right\}}", "{}", r"\lbrace {} \rbrace"))
    return rf"\{{{', '.join(map(str, members))}\}}", form.format(", ".join(map(str, other)))


@_equal
def _list_in_words(lot: random.Random) -> tuple[str, str]:
    a, b, c = lot.sample(range(1, 60), 3)
    return f"{a}, {b}, {c}", lot.choice((f"{a}, {b} and {c}", f"{c}, {a} or {b}", rf"{a}, {b}, \text{{ and }} {c}"))


@_equal
def _roots_named(lot: random.Random) -> tuple[str, str]:
    a, b = lot.sample(range(1, 60), 2)
    return f"{a}, {b}", lot.choice((f"x = {b}, x = {a}", rf"x={a} \text{{ or }} x={b}", f"x_1 = {a}, x_2 = {b}"))


@_equal
def _plus_minus(lot: random.Random) -> tuple[str, str]:
    a = _small(lot)
    return lot.choice(((rf"\pm {a}", f"{a}, -{a}"), (rf"\{{-{a}, {a}\}}", f"±{a}"), (f"{a},-{a}", rf"x = \pm {a}")))


@_unequal
def _set_with_another_member(lot: random.Random) -> tuple[str, str]:
    members = lot.sample(range(1, 60), 4)
    other = lot.choice((members[:3], [*members, 77], [*members[:3], 88]))
    return rf"\{{{', '.join(map(str, members))}\}}", rf"\{{{', '.join(map(str, other))}\}}"


@_unequal
def _one_of_several(lot: random.Random) -> tuple[str, str]:
    a = lot.randint(2, 60)
    return f"{a}", lot.choice((f"{a} or {a + 1}", f"{a}, {a + 1}", rf"\{{{a}, {a + 1}\}}", f"{a + 1}; {a}", rf"x={a}, x={a + 1}", rf"{a} \text{{ or }} {a + 1}", rf"{a} \pm 1", f"${a}$ or ${a + 1}$", f"{a} {a}", rf"{a}\quad {a + 1}"))  # fmt: skip


@_unequal
def _half_of_plus_minus(lot: random.Random) -> tuple[str, str]:
    a = _small(lot)
    return rf"\pm {a}", lot.choice((f"{a}", f"-{a}", rf"\pm {a + 1}"))


@_equal
def _point_dressed(lot: random.Random) -> tuple[str, str]:
    a, b, c = (lot.randint(-20, 20) for _ in range(3))
    return f"({a},{b},{c})", rf"\left( {a}, {b}, {c} \right)"


@_equal
def _point_as_column(lot: random.Random) -> tuple[str, str]:
    a, b, c = (lot.randint(1, 20) for _ in range(3))
    return rf"\begin{{pmatrix}}{a}\\{b}\\{c}\end{{pmatrix}}", f"({a}, {b}, {c})"


@_unequal
def _point_turned(lot: random.Random) -> tuple[str, str]:
    a, b, c = lot.sample(range(1, 20), 3)
    return f"({a},{b},{c})", lot.choice((f"({b},{a},{c})", f"({a},{b})", f"({a},{b},{c + 1})"))


@_equal
def _matrix_brackets(lot: random.Random) -> tuple[str, str]:
    a, b, c, d = (lot.randint(0, 20) for _ in range(4))
    return (
        rf"\begin{{pmatrix}}{a}&{b}\\{c}&{d}\end{{pmatrix}}",
        rf"\begin{{bmatrix}} {a} & {b} \\ {c} & {d} \end{{bmatrix}}",
    )


@_unequal
def _matrix_transposed(lot: random.Random) -> tuple[str, str]:
    a, b, c, d = lot.sample(range(20), 4)
    return rf"\begin{{pmatrix}}{a}&{b}\\{c}&{d}\end{{pmatrix}}", rf"\begin{{pmatrix}}{a}&{c}\\{b}&{d}\end{{pmatrix}}"


@_unequal
def _infinity_plus(lot: random.Random) -> tuple[str, str]:
    return r"\infty", lot.choice(
        (r"-\infty", rf"\infty + {_small(lot)}", rf"{_small(lot)}\infty", f"{10 ** _small(lot)}")
    )


# --- words, choices, restated questions


@_equal
def _words_dressed(lot: random.Random) -> tuple[str, str]:
    word = _word(lot)
    return word, lot.choice(
        (rf"\text{{{word}}}", rf"\textbf{{{word}}}", f"{word}.", rf"\mathrm{{{word}}}", word.upper(), word.capitalize())
    )


@_equal
def _letter_dressed(lot: random.Random) -> tuple[str, str]:
    letter = lot.choice("ABCDE")
    return letter, lot.choice((f"({letter})", rf"\text{{{letter}}}", rf"\textbf{{({letter})}}", f"{letter}."))


@_unequal
def _anagram(lot: random.Random) -> tuple[str, str]:
    word = _word(lot)
    letters = list(word)
    while "".join(letters) == word:
        lot.shuffle(letters)
    return word, "".join(letters)


@_unequal
def _anagram_of_a_short_word(lot: random.Random) -> tuple[str, str]:
    return lot.choice((("no", "on"), ("east", "seat"), ("left", "felt"), ("Alice", "Celia"), ("AB", "BA"), ("stop", "pots"), ("PQ", "QP"), ("evil", "vile"), ("ten", "net"), ("odd", "dod"), ("saw", "was"), ("own", "won")))  # fmt: skip


@_unequal
def _negated_word(lot: random.Random) -> tuple[str, str]:
    word = _word(lot)
    return word, lot.choice((f"not {word}", f"un{word}", f"{word} or not", f"{word} {word[:2]}"))


@_unequal
def _other_case_of_a_letter(lot: random.Random) -> tuple[str, str]:
    letter = lot.choice("xyznkab")
    return letter, letter.upper()


@_unequal
def _sum_restated(lot: random.Random) -> tuple[str, str]:
    number = lot.randint(3, 60)
    return f"{number * (number + 1) // 2}", lot.choice(
        (rf"\sum_{{k=1}}^{{{number}}} k", rf"\sum_{{i=1}}^{{{number}}} i")
    )


@_unequal
def _arithmetic_restated(lot: random.Random) -> tuple[str, str]:
    a, b = _whole(lot), _whole(lot)
    return lot.choice(((f"{a + b}", f"{a}+{b}"), (f"{a * b}", rf"{a} \times {b}"), (f"{a + b}", rf"{a} + {b}"), (f"{a - b}", f"{a}-{b}"), (f"{a * b}", f"{a}*{b}")))  # fmt: skip


@_unequal
def _calculus_restated(lot: random.Random) -> tuple[str, str]:
    n = lot.randint(2, 9)
    return lot.choice(
        (
            (rf"\frac{{1}}{{{n + 1}}}", rf"\int_0^1 x^{n} \, dx"), (f"{n}x^{n - 1}" if n > 2 else "2x", rf"\frac{{d}}{{dx}} x^{n}"),
            (f"{n}", rf"\lim_{{x \to 0}} \frac{{\sin({n}x)}}{{x}}"), (f"{n}", rf"\gcd({2 * n}, {3 * n})"), (f"{n}", rf"\max(1, {n})"),
            (f"{n * 3 - 2}", rf"\begin{{vmatrix}}{n}&2\\1&3\end{{vmatrix}}"),
        )
    )  # fmt: skip


# --- tiny factors: equal for off = 0, different for off = 1, however small both are

Tiny = Callable[[random.Random, int], tuple[str, str]]
TINY: dict[str, Tiny] = {}


def _tiny(rule: Tiny) -> Tiny:
    name = rule.__name__.strip("_")
    TINY[name] = rule
    EQUAL[f"{name}_equal"] = lambda lot: rule(lot, 0)
    UNEQUAL[f"{name}_unequal"] = lambda lot: rule(lot, 1)
    return rule


def _places(lot: random.Random) -> int:
    return lot.randint(13, 60)


@_tiny
def _poisson(lot: random.Random, off: int) -> tuple[str, str]:
    mean, count = lot.randint(30, 90), lot.randint(2, 40)
    return (
        rf"\frac{{e^{{-{mean}}}{mean}^{{{count}}}}}{{{count}!}}",
        rf"e^{{-{mean}}}\cdot\frac{{{mean}^{{{count - 1 + off}}}}}{{{count - 1}!}}\cdot\frac{{{mean}}}{{{count}}}",
    )


@_tiny
def _binomial(lot: random.Random, off: int) -> tuple[str, str]:
    n = lot.randint(60, 120)
    k = lot.randint(2, n // 2 - 1)
    return (
        rf"\frac{{{n}!}}{{{k}!\,{n - k}!\,2^{{{n}}}}}",
        rf"\binom{{{n}}}{{{k + off}}}\left(\frac{{1}}{{2}}\right)^{{{n}}}",
    )


@_tiny
def _birthdays(lot: random.Random, off: int) -> tuple[str, str]:
    people = lot.randint(5, 60)
    return (
        rf"1-\frac{{365!}}{{{365 - people}!\cdot365^{{{people}}}}}",
        rf"1-\frac{{364!}}{{{365 - people + off}!\cdot365^{{{people - 1}}}}}",
    )


@_tiny
def _near_one(lot: random.Random, off: int) -> tuple[str, str]:
    n = lot.randint(30, 400)
    return rf"1-e^{{-{n}}}", rf"\frac{{e^{{{n + off}}}-1}}{{e^{{{n + off}}}}}"


@_tiny
def _near_one_in_powers_of_ten(lot: random.Random, off: int) -> tuple[str, str]:
    n = _places(lot)
    return rf"\ln(1+10^{{-{n}}})", rf"\ln(10^{{{n}}}+1)-{n + off}\ln 10" if off == 0 else rf"\ln(1+10^{{-{n + 1}}})"


@_tiny
def _root_of_a_power_of_ten(lot: random.Random, off: int) -> tuple[str, str]:
    a, b, n = lot.randint(2, 40), lot.choice((2, 3, 5, 7, 11)), _places(lot)
    return rf"\sqrt{{{a * a * b}}}\cdot10^{{-{n}}}", rf"\frac{{{a + off}\sqrt{{{b}}}}}{{10^{{{n}}}}}"


@_tiny
def _small_conjugate(lot: random.Random, off: int) -> tuple[str, str]:
    a, n = lot.choice((2, 3, 5, 6, 7, 10)), _places(lot)
    sign = "-" if off else "+"
    return (
        rf"\frac{{\sqrt{{{a}}}+1}}{{10^{{{n}}}}}",
        rf"\frac{{{a - 1}}}{{(\sqrt{{{a}}}{'-' if sign == '+' else '+'}1)\cdot10^{{{n}}}}}",
    )


@_tiny
def _reciprocal_factorial(lot: random.Random, off: int) -> tuple[str, str]:
    n = lot.randint(16, 60)
    return rf"\frac{{\pi}}{{{n}!}}", rf"\frac{{{n + 1 + off}\pi}}{{{n + 1}!}}"


@_tiny
def _sine(lot: random.Random, off: int) -> tuple[str, str]:
    n = _places(lot)
    angle = lot.randint(1, 9)
    return rf"10^{{-{n}}}\sin({2 * angle})", rf"\frac{{{2 + off}\sin({angle})\cos({angle})}}{{10^{{{n}}}}}"


@_tiny
def _logarithm(lot: random.Random, off: int) -> tuple[str, str]:
    n, power = _places(lot), lot.randint(2, 9)
    return rf"10^{{-{n}}}\ln({2**power})", rf"{power + off}\cdot10^{{-{n}}}\ln(2)"


@_tiny
def _small_letters(lot: random.Random, off: int) -> tuple[str, str]:
    n, a = lot.randint(30, 120), lot.randint(1, 9)
    return rf"e^{{-{n}}}(x^2-{a * a})", rf"\frac{{(x-{a})(x+{a + off})}}{{e^{{{n}}}}}"


@_tiny
def _factor_of_both(lot: random.Random, off: int) -> tuple[str, str]:
    n, a, b = _places(lot), lot.randint(2, 9), lot.randint(2, 9)
    return (
        rf"\frac{{e^{{{a}}}+\pi^{{{b}}}}}{{10^{{{n}}}}}",
        rf"10^{{-{n}}}\pi^{{{b}}}+\frac{{e^{{{a + off}}}}}{{10^{{{n}}}}}",
    )


def pairs(seed: int, each: int = EACH) -> Iterator[Pair]:
    """Yield up to ``each`` different pairs of every rule; some rules have fewer."""
    for rules, equal in ((EQUAL, True), (UNEQUAL, False)):
        for name, rule in rules.items():
            lot, seen = random.Random(f"{seed}:{name}"), set[tuple[str, str]]()
            for _ in range(4 * each):
                if len(seen) < each and (pair := rule(lot)) not in seen:
                    seen.add(pair)
                    yield Pair(name, *pair, equal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=EACH)
    arguments = parser.parse_args()
    for pair in pairs(arguments.seed, arguments.each):
        print(json.dumps(dataclasses.asdict(pair), ensure_ascii=False))


if __name__ == "__main__":
    main()
