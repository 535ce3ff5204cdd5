"""Follow the head: pull every version that the coordinator makes the head, and let the engine swap to it.

::

    policy (broadcast) ──▶ newest update ──▶ read its snapshot in a thread ──▶ engine.swap ──▶ waiters wake
                               ▲                  │ WeightsError: missing, torn, corrupt, does not fit
                               └──────────────────┘ the old version goes on serving; again after a growing wait,
                                                    or at once for a newer update

Versions never go down, and one that a newer update overtook is not pulled. A prompt waits for its ``min_version`` here,
for as long as it takes; only while pulls have been failing for a while it is given back for another replica to try.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from services.rollout.engine import Engine
from shared import streams
from shared.bus import Bus
from shared.errors import TemporaryError, WeightsError
from shared.messages import PolicyUpdate, PolicyVersion
from shared.telemetry import Status, tell

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

POLICY_VERSION = Gauge("penstock_rollout_policy_version", "The policy version that this replica serves.")
WEIGHT_PULL = Histogram(
    "penstock_rollout_weight_pull_seconds",
    "Seconds from the start of reading a snapshot to its weights being live.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
WEIGHT_PULL_FAILURES = Counter(
    "penstock_rollout_weight_pull_failures_total", "Snapshots that were missing, torn, corrupt or of another model."
)

_FIRST_RETRY_S, _LONGEST_RETRY_S, _IDLE_S = 0.1, 5.0, 1.0


class Follower:
    """Keeps ``engine`` on the head.

    Args:
        give_up_s: a waiter is sent away once pulls have been failing for so long.
    """

    def __init__(self, bus: Bus, engine: Engine, status: Status, replica: str, *, give_up_s: float = 60.0) -> None:
        self._bus = bus
        self._engine = engine
        self._status = status
        self._replica = replica
        self._give_up_s = give_up_s
        self._changed = asyncio.Condition()
        self._failing_since_s: float | None = None
        self._wanted: PolicyUpdate | None = None
        self._after = "0"
        self._released = False
        self.failures = 0

    @property
    def failing(self) -> bool:
        """Whether the newest attempt to pull failed."""
        return self._failing_since_s is not None

    async def wait_for(self, version: PolicyVersion) -> None:
        """Wait until the engine holds ``version`` or a newer one.

        Raises:
            TemporaryError: pulls have been failing for ``give_up_s``: another replica may do better.
            asyncio.CancelledError: the replica stops; the worker gives the prompt back.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._holds(version) or self._gave_up() or self._released)
        if not self._holds(version):
            if self._released:
                raise asyncio.CancelledError(f"the replica stops while it waits for policy version {version}")
            raise TemporaryError(
                f"expected to pull policy version {version}, found failures for {self._give_up_s:.0f} s: "
                f"{self._status.last_error}"
            )

    async def release(self) -> None:
        """Send everybody away who waits, now and later: a replica that stops need not wait for a version."""
        self._released = True
        await self._notify()

    async def run(self) -> None:
        """Follow the head until cancelled."""
        for entry, update in await self._bus.newest(streams.POLICY, PolicyUpdate):
            self._after, self._wanted = entry, update
        retry_s = _FIRST_RETRY_S
        while True:
            wait_s = _IDLE_S
            if self._wanted is not None and not self._holds(self._wanted.record.version):
                if await self._pull(self._wanted):
                    retry_s = _FIRST_RETRY_S
                else:
                    wait_s, retry_s = retry_s, min(2 * retry_s, _LONGEST_RETRY_S)
            found = await self._bus.tail(streams.POLICY, PolicyUpdate, self._after, 64, wait_s)
            if found:
                self._after, self._wanted = found[-1]
                retry_s = _FIRST_RETRY_S

    async def _pull(self, update: PolicyUpdate) -> bool:
        record, started_s = update.record, time.monotonic()
        try:
            tensors = await asyncio.to_thread(_read, Path(record.location), record.manifest_digest)
            await self._engine.swap(tensors, record.version)
        except WeightsError as error:
            await self._note_failure(record.version, error)
            return False
        pull_s = time.monotonic() - started_s
        WEIGHT_PULL.observe(pull_s)
        POLICY_VERSION.set(record.version)
        log.info("policy version live", extra={"version": record.version, "step": record.step, "pull_s": pull_s})
        self._failing_since_s = None
        self._status.version = record.version
        self._status.last_error = ""
        await self._notify()
        return True

    async def _note_failure(self, version: PolicyVersion, error: WeightsError) -> None:
        self.failures += 1
        WEIGHT_PULL_FAILURES.inc()
        self._status.last_error = str(error)
        log.warning("weights refused, the old version goes on", extra={"version": version, "error": str(error)})
        if self._failing_since_s is None:
            self._failing_since_s = time.monotonic()
            await tell(self._bus, self._replica, "weights refused", str(error), version=int(version))
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _holds(self, version: PolicyVersion) -> bool:
        held = self._engine.version
        return held is not None and held >= version

    def _gave_up(self) -> bool:
        since_s = self._failing_since_s
        return since_s is not None and time.monotonic() - since_s >= self._give_up_s


def _read(location: Path, digest: str) -> "dict[str, torch.Tensor]":
    from shared.weights.snapshot import read_snapshot  # torch: late, so that a replica is there before it is loaded

    return read_snapshot(location, digest)
