"""Count, mean and squared differences of a scorer's values over all reward replicas. A group that is scored again
counts once.
"""

from collections.abc import Sequence

from shared.bus.bus import Bus
from shared.bus.keys import key

STATISTICS = key(
    "statistics:<scorer>", "hash", "the run's", "count, mean and sum of squared differences of a scorer's values"
)
COUNTED_GROUPS = key(
    "statistics:<scorer>:groups", "sorted set", "the run's", "the newest 10,000 groups in these statistics"
)
_REMEMBERED_GROUPS = 10_000
"""Number of groups that are known to be counted; one that is redone is among the newest."""


async def observe(bus: Bus, scorer: str, group_id: int, values: Sequence[float]) -> tuple[float, float, float]:
    """Count the values of a group that was not counted; return count, mean and sum of squared differences."""
    answer = await bus.script(
        "observe", statistics=STATISTICS.of(scorer), groups=COUNTED_GROUPS.of(scorer), group_id=group_id,
        remembered=_REMEMBERED_GROUPS, values=[repr(float(value)) for value in values],
    )  # fmt: skip
    count, mean, squares = map(float, answer)
    return count, mean, squares
