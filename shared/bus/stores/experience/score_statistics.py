"""Count, mean and squared differences of a scorer's values over all reward replicas; each group counts once."""

from collections.abc import Sequence

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import key

STATISTICS = key(
    "statistics:<scorer>", "hash", "the run's", "count, mean and sum of squared differences of a scorer's values"
)
COUNTED_GROUPS = key(
    "statistics:<scorer>:groups", "sorted set", "the run's", "the newest 10,000 groups in these statistics"
)
_REMEMBERED_GROUPS = 10_000
"""Number of counted groups to remember; a repeated group is among the newest."""


async def observe(bus: Bus, scorer: str, group_id: int, values: Sequence[float]) -> tuple[float, float, float]:
    """Add a group's values, once; return count, mean and sum of squared differences."""
    answer = await bus.script(
        "observe", statistics=STATISTICS.of(scorer), groups=COUNTED_GROUPS.of(scorer), group_id=group_id,
        remembered=_REMEMBERED_GROUPS, values=[repr(float(value)) for value in values],
    )  # fmt: skip
    count, mean, squares = map(float, answer)
    return count, mean, squares
