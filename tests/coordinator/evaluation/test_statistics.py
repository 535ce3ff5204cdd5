"""Laws of the statistics: literals worked by hand."""

import pytest

from penstock.services.coordinator.evaluation.statistics import Estimate, estimate, fall, pass_at

DIGITS = 1e-4
"""Of the literals."""


@pytest.mark.parametrize(
    ("k", "samples", "correct", "expected"),
    [
        (1, 4, 1, 0.25),
        (2, 4, 1, 0.5),  # 3 of 6 pairs hold it
        (3, 5, 2, 0.9),  # one of 10 triples holds neither
        (4, 4, 0, 0.0),
        (4, 4, 1, 1.0),
        (2, 3, 2, 1.0),  # only one is wrong: every pair holds a right one
    ],
)
def test_pass_at_k_is_the_share_of_draws_that_hold_a_correct_one(
    k: int, samples: int, correct: int, expected: float
) -> None:
    assert pass_at(k, samples, correct) == pytest.approx(expected)


def test_the_interval_of_one_sample_a_problem_is_wilsons() -> None:
    interval = estimate([1.0] * 8 + [0.0] * 2, samples=1)  # p = 0.8, n = 10: (0.9921 ± 0.3134) / 1.3842, by hand
    assert (interval.value, interval.low, interval.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=DIGITS)


def test_nothing_right_is_not_certainly_nothing() -> None:
    interval = estimate([0.0] * 10, samples=1)  # z² / (n + z²) = 3.8415 / 13.8415
    assert (interval.value, interval.low, interval.high) == pytest.approx((0.0, 0.0, 0.2775), abs=DIGITS)
    assert estimate([0.0] * 10, samples=100) == interval, "a hundred samples of ten problems are ten problems"


def test_samples_that_agree_within_a_problem_count_once() -> None:
    single = estimate([1.0] * 5 + [0.0] * 5, samples=1)
    assert estimate([1.0] * 5 + [0.0] * 5, samples=8) == single


def test_samples_that_vary_within_a_problem_narrow_the_interval_to_all_of_them() -> None:
    alike = estimate([0.5] * 10, samples=8)  # no spread between problems: 80 observations, z² / 80 = 0.04802
    # centre 0.5; half = 1.96 √(0.25 / 80 + 3.8415 / 25600) / 1.04802 = 0.10702
    assert (alike.low, alike.high) == pytest.approx((0.39297, 0.60703), abs=DIGITS)


def test_a_fall_has_newcombes_interval() -> None:
    # Newcombe 1998, table II, example a: 56/70 against 48/80: 0.2, 0.0524 to 0.3339
    before, after = estimate([1.0] * 56 + [0.0] * 14, 1), estimate([1.0] * 48 + [0.0] * 32, 1)
    difference = fall(before, after)
    assert (difference.value, difference.low, difference.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=DIGITS)
    assert fall(Estimate(0.5, 0.4, 0.6), Estimate(0.5, 0.4, 0.6)).value == 0.0
