"""Waits between attempts: doubled after each failure, up to a cap."""

import dataclasses
import random


@dataclasses.dataclass(frozen=True, slots=True)
class Backoff:
    """The wait after each of several failures in a row.

    >>> [Backoff(0.5, longest_s=3.0).wait_s(failures) for failures in (1, 2, 3, 4, 1000)]
    [0.5, 1.0, 2.0, 3.0, 3.0]
    """

    first_s: float
    longest_s: float

    def wait_s(self, failures: int) -> float:
        """Return the wait after the ``failures``-th failure in a row, counted from 1."""
        return min(self.first_s * 2.0 ** min(failures - 1, 60), self.longest_s)

    def jittered_s(self, failures: int) -> float:
        """Return the wait, shortened at random by up to half, so that many clients do not return at once."""
        return self.wait_s(failures) * random.uniform(0.5, 1.0)
