"""Signals of problems, for ``data.curriculum``: an average of p(1 − p) of each problem's groups.

They change in the commit's transaction only (``commit.lua``). A checkpoint holds them, and the commit that publishes
its weights again puts them back: after a rollback, and after the bus was lost.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import RUN, key
from penstock.shared.bus.messages import Float32Array, PolicyVersion

SIGNALS = key("signals", "hash", "the run's", "problem → average of p(1 − p) of its groups (`data.curriculum`)")
UNSEEN = 0.25
"""Signal of a problem without a group: p(1 − p) at p = ½."""
RATE = 0.5
"""Weight of a group against those before it."""


@dataclasses.dataclass(frozen=True, slots=True)
class SignalChange:
    """What a commit changes: groups' signals, in order, or all signals at once."""

    groups: Sequence[tuple[str, float]] = ()
    whole: Mapping[str, str] | None = None

    def encoded(self) -> str:
        """Return the change for ``commit.lua``."""
        groups = [list(group) for group in self.groups]
        return json.dumps({"groups": groups, "whole": None if self.whole is None else list(self.whole.items())})


def signal(rewards: Float32Array) -> float:
    """Return p(1 − p) of rewards 0 and 1, in general the variance, at most ¼.

    >>> signal(np.array([1, 0, 0, 0], dtype=np.float32))
    0.1875
    """
    return min(UNSEEN, float(rewards.astype(np.float64).var()))


async def read_signals(bus: Bus) -> dict[str, str]:
    """Return every problem's signal, as it is stored."""
    return (await read_current(bus))[1]


async def read_current(bus: Bus) -> tuple[PolicyVersion | None, dict[str, str]]:
    """Return the newest version and the signals of its commit."""
    newest, signals = await bus.ask_all(("HGET", RUN, "newest_version"), ("HGETALL", SIGNALS), at_once=True)
    version = None if newest is None else PolicyVersion(int(newest))
    return version, {name.decode(): value.decode() for name, value in signals.items()}
