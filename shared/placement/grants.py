"""Grant shared devices to the trainer, reward models and replicas in turn (docs/placement.md).

One leader decides; its term fences each change. Training comes before scoring, and scoring before generation. The
trainer and the reward service request only when they have work for the devices, and release them by themselves, so no
phase starves.
"""

import asyncio
import dataclasses
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.device_leases import (
    DeviceLook,
    DeviceRequest,
    Grant,
    Phase,
    ask_back,
    grant_devices,
    look_at_devices,
)
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat
from penstock.shared.placement.devices import devices_of
from penstock.shared.settings import Settings
from penstock.shared.settings.placement import OPTIMIZER_RUNG, REPLICA_RUNG, RUNGS, USABLE_IN_TURNS

log = logging.getLogger(__name__)

_LOOK_S = 0.03
_AWAY_S = 1.0
"""Between two looks: another coordinator led meanwhile, or the bus was unreachable."""
SETTLE_S = 5.0
"""Until holders that are alive have renewed their leases once the bus is back: more than twice a client's longest wait
between two attempts.
"""
_ADDED = {1: {"kv_cache"}, 2: {"weights", "shadow"}}
_ADDED_BY_TRAINER = {OPTIMIZER_RUNG: {"optimizer"}, 4: {"weights", "gradients"}}
"""Components that each rung frees in addition to the one below: of a replica for training, of the trainer for generation."""
MEASURED = "memory_"
_PRECEDENCE: Mapping[Phase, int] = {"train": 0, "score": 1, "generate": 2}


class Rung(NamedTuple):
    """Of the ladder, and at rung 3 the bytes that the trainer has to move to the host; compares by both."""

    number: int
    offload_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    grants: tuple[DeviceRequest, ...]
    ask_back: tuple[tuple[int, Grant], ...]


def decide(look: DeviceLook) -> Decision:
    """Training comes first, then scoring.

    >>> request, replica = DeviceRequest("reward-0", "5f3a", "score", (0,)), Grant("rollout-0", "1b", "generate", 7, -1)
    >>> decide(DeviceLook((replica,), (request,))).ask_back == ((0, replica),)
    True
    """
    holders = {index: grant for index, grant in enumerate(look.grants) if grant is not None}
    first: defaultdict[int, int] = defaultdict(lambda: max(_PRECEDENCE.values()))
    for request in look.requests:
        for index in request.devices:
            first[index] = min(first[index], _PRECEDENCE[request.phase])
    grants = [
        request
        for request in look.requests
        if holders.keys().isdisjoint(request.devices)
        and all(first[index] == _PRECEDENCE[request.phase] for index in request.devices)
    ]
    asked = [
        (index, grant) for index, grant in holders.items() if grant.rung < 0 and first[index] < _PRECEDENCE[grant.phase]
    ]
    return Decision(tuple(grants), tuple(asked))


def lowest_rung(
    replica: Mapping[str, float],
    trainer: Mapping[str, float],
    capacity: float,
    scoring: float = 0.0,
    *,
    frees_snapshots: bool = False,
) -> Rung:
    """Return the lowest rung at which each phase fits into ``capacity`` bytes; the highest if any is not measured yet.

    ``trainer`` has its ``peak`` in a step with the snapshot, and what it holds between two steps by component;
    ``scoring``: the peak of reward models, which hold nothing in other phases; ``frees_snapshots``: from rung 2 on, the
    snapshot is away during a step.

    >>> lowest_rung({"weights": 2.0, "kv_cache": 3.0}, {"peak": 5.0, "weights": 2.0, "optimizer": 2.0}, 10.0)
    Rung(number=1, offload_bytes=0)
    >>> lowest_rung({"weights": 2.0, "kv_cache": 3.0}, {"peak": 8.0, "weights": 2.0, "optimizer": 6.0}, 10.0)
    Rung(number=3, offload_bytes=4)
    """
    if not replica or "peak" not in trainer or not capacity:
        return Rung(RUNGS[-1])
    limit, lacking = USABLE_IN_TURNS * capacity, 0.0
    resident = {component: nbytes for component, nbytes in trainer.items() if component != "peak"}
    for rung in RUNGS:
        away = trainer.get("snapshot", 0.0) if frees_snapshots and rung >= REPLICA_RUNG else 0.0
        training = _kept(replica, _ADDED, rung) + trainer["peak"] - away
        waiting = _kept(resident, _ADDED_BY_TRAINER, rung) + max(
            sum(replica.values()), _kept(replica, _ADDED, rung) + scoring
        )
        if max(training, waiting) <= limit:
            return Rung(rung, math.ceil(lacking) if rung == OPTIMIZER_RUNG else 0)
        lacking = max(0.0, waiting - limit)
    return Rung(RUNGS[-1])


def _kept(memory: Mapping[str, float], added: Mapping[int, set[str]], rung: int) -> float:
    freed = {component for step, components in added.items() if step <= rung for component in components}
    return sum(nbytes for component, nbytes in memory.items() if component not in freed)


class DeviceGrants:
    """The leader's loop."""

    def __init__(self, bus: Bus, ledger: Ledger, settings: Settings, beats: Callable[[], Sequence[Heartbeat]]) -> None:
        self._bus = bus
        self._ledger = ledger
        self._settings = settings
        self._beats = beats
        self._peaks: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        """By service and replica."""
        self._looked_s = self._since_s = -math.inf
        """Monotonic time of the last look, and since when looks have followed one another."""

    async def run(self) -> None:
        while self._settings.shared_devices:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        term = self._ledger.term or 0
        look = await look_at_devices(self._bus, len(self._settings.shared_devices))
        decision = decide(look if self._has_settled(time.monotonic()) else look.with_lapsed)
        for index, grant in decision.ask_back:
            rung = max(self._rung(other) for other, held in decision.ask_back if held.term == grant.term)
            await ask_back(self._bus, term, index, grant.term, rung.number, rung.offload_bytes)
        for request in decision.grants:
            granted = await grant_devices(self._bus, term, request, self._settings.internal.claim_after_s)
            log.debug("devices granted", extra={"replica": request.replica, "term": granted})

    def _has_settled(self, now_s: float) -> bool:
        """Whether holders have had time to renew their leases since this process last could not see them."""
        if now_s - self._looked_s > _AWAY_S:
            self._since_s = now_s
        self._looked_s = now_s
        return now_s - self._since_s >= SETTLE_S

    def _rung(self, index: int) -> Rung:
        chosen = self._settings.placement.rung
        if chosen != "auto":
            return Rung(chosen)
        self._note_peaks()
        (replica, models) = (self._peaks_of(service, index) for service in ("rollout", "reward"))
        scores = index in devices_of(self._settings, "reward", "reward-0")
        if scores and "peak" not in models:
            return Rung(RUNGS[-1])
        beats = (beat for beat in self._beats() if beat.service == "trainer")
        trainer = next((self._peaks["trainer", beat.replica] for beat in beats), {})
        capacity, frees = replica.pop("capacity", 0.0), self._settings.frees_snapshots
        return lowest_rung(replica, trainer, capacity, models.get("peak", 0.0), frees_snapshots=frees)

    def _peaks_of(self, service: str, index: int) -> dict[str, float]:
        """Return those of the replica of ``service`` that uses device ``index``."""
        replicas = (name for of, name in self._peaks if of == service)
        using = (name for name in replicas if index in devices_of(self._settings, service, name))
        return dict(self._peaks[service, name]) if (name := next(using, "")) else {}

    def _note_peaks(self) -> None:
        for beat in self._beats():
            peaks = self._peaks[beat.service, beat.replica]
            for name, value in beat.values.items():
                if name.startswith(MEASURED):
                    component = name.removeprefix(MEASURED)
                    peaks[component] = max(peaks.get(component, 0.0), value)
