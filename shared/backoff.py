"""Capped exponential backoff."""

import dataclasses
import random


@dataclasses.dataclass(frozen=True, slots=True)
class Backoff:
    """The wait after consecutive failures.

    >>> [Backoff(0.5, longest_s=3.0).wait_s(failures) for failures in (1, 2, 3, 4, 1000)]
    [0.5, 1.0, 2.0, 3.0, 3.0]
    """

    first_s: float
    longest_s: float

    def wait_s(self, failures: int) -> float:
        return min(self.first_s * 2.0 ** min(failures - 1, 60), self.longest_s)

    def jittered_s(self, failures: int) -> float:
        """Return the wait, randomly shortened by up to half, to spread out clients."""
        return self.wait_s(failures) * random.uniform(0.5, 1.0)
