"""Accuracy and pass@k with 95 % intervals, and the significance of a fall.

A problem's samples are correlated, so the sampling unit is the problem.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

Z = 1.959964
"""97.5 % quantile of the normal distribution."""


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """A share, 0 to 1, and its 95 % interval."""

    value: float
    low: float
    high: float


def pass_at(k: int, samples: int, correct: int) -> float:
    """Return the probability that one of ``k`` completions is correct, if ``correct`` of ``samples`` are.

    1 − C(n − c, k) / C(n, k), unbiased for k ≤ n (Chen et al. 2021, arXiv:2107.03374, equation 1).

    >>> pass_at(2, 4, 1)    # of 6 pairs, 3 hold the correct one
    0.5
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def estimate(of_problems: Sequence[float], samples: int) -> Estimate:
    """Return the mean share over problems, and its interval.

    Wilson's score interval (1927) of p = mean over ``observations`` n::

        (p + z²/2n ± z·√(p(1 − p)/n + z²/4n²)) / (1 + z²/n)

    n is the effective sample size of a cluster sample, p(1 − p) / (s²/m) with m problems and variance s² of their
    shares, between m and m·samples (Dean and Pagano 2015, doi:10.1093/jssam/smv024).
    """
    problems = len(of_problems)
    mean = statistics.fmean(of_problems)
    n = _observations(of_problems, mean, samples)
    centre = (mean + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * math.sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    assert problems <= n <= problems * samples
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def _observations(of_problems: Sequence[float], mean: float, samples: int) -> float:
    problems = len(of_problems)
    if samples == 1 or problems == 1 or mean in (0.0, 1.0):
        return float(problems)
    variance = statistics.variance(of_problems, mean) / problems
    observations = mean * (1 - mean) / variance if variance else math.inf
    return min(max(observations, float(problems)), float(problems * samples))


def fall(before: Estimate, after: Estimate) -> Estimate:
    """Return how much lower ``after`` is than ``before``, with its 95 % interval.

    Newcombe's hybrid score interval (1998, method 10)::

        d = p₁ − p₂,   low = d − √((p₁ − low₁)² + (high₂ − p₂)²),   high = d + √((high₁ − p₁)² + (p₂ − low₂)²)

    It assumes independent shares; shared problems make it conservative.
    """
    difference = before.value - after.value
    low = difference - math.hypot(before.value - before.low, after.high - after.value)
    high = difference + math.hypot(before.high - before.value, after.value - after.low)
    return Estimate(difference, low, high)
