"""Follow the head: pull each version that the coordinator makes the head, and swap the engine to it.

::

    policy (broadcast) ──▶ newest update ──▶ for each source: ask ─▶ engine.stage ─▶ engine.swap ──▶ waiters wake
                               ▲                  │ WeightsError: gone, too slow, torn, corrupt, does not fit
                               │                  ▼
                               │             the next source (see ``sources``)
                               └── all failed: old version keeps serving; retry with backoff,
                                   or at once for a newer update, which also ends a round

Versions never decrease; overtaken ones are skipped. A version kept for an evaluation (``version_hold``) stays until
that ends. Prompts wait for ``min_version`` without timeout, but are returned if pulls keep failing or an older version
is kept. If no source repairs torn weights, the process stops.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from prometheus_client import Counter, Gauge, Histogram

from penstock.services.rollout.engines.engine import Engine, EngineDied, SwapReport
from penstock.services.rollout.probe_check import ProbeCheck
from penstock.services.rollout.sources import PullAttempt, attempts, holders
from penstock.services.rollout.version_hold import Hold
from penstock.shared.backoff import Backoff
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyRecord, PolicyUpdate, PolicyVersion
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.errors import NotHere, SourceGone, WeightsError
from penstock.shared.process.telemetry import Status, tell
from penstock.shared.tasks import together
from penstock.shared.weights.receiver.puller import Puller, file_offer
from penstock.shared.weights.transport.offer import Offer

log = logging.getLogger(__name__)

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
POLICY_VERSION = Gauge("penstock_rollout_policy_version", "The policy version that this replica serves.")
WEIGHT_PULL = Histogram(
    "penstock_rollout_weight_pull_seconds",
    "Seconds from asking a source for a version to having received all of it, by kind of source.",
    ["source"],
    buckets=_SECONDS,
)
WEIGHT_SWAP = Histogram(
    "penstock_rollout_weight_swap_seconds",
    "Seconds from the last decoding step under old weights to the first under new ones, by how they were put in place.",
    ["path"],
    buckets=_SECONDS,
)
WEIGHT_BYTES = Counter(
    "penstock_rollout_weight_received_bytes_total", "Bytes of weights received whole, by kind of source.", ["source"]
)
WEIGHT_PULL_FAILURES = Counter(
    "penstock_rollout_weight_pull_failures_total",
    "Attempts to pull that failed, by transport (none: nothing was offered) and by what failed: ask, receive, swap.",
    ["transport", "reason"],
)
WEIGHT_PULL_FAILURES.labels("none", "ask")  # starts the series at 0, so that its first increase is visible
WEIGHT_PULLS_OVERTAKEN = Counter(
    "penstock_rollout_weight_pulls_overtaken_total", "Versions that were skipped for a newer one."
)

_BACKOFF = Backoff(0.1, longest_s=5.0)
_IDLE_S = 5.0
_LOOK_S = 0.1


class Follower:
    """Keeps ``engine`` on the head; pulls failing for ``give_up_s`` send waiters away. ``pulling``: entered around
    each pull; waits while another process uses the device.
    """

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        status: Status,
        replica: str,
        puller: Puller,
        *,
        deadline_s: float,
        probe_margin: float,
        give_up_s: float = 60.0,
        hold: Hold | None = None,
        pulling: Callable[[], contextlib.AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.bus = bus
        self._engine = engine
        self._status = status
        self._replica = replica
        self._puller = puller
        self._deadline_s = deadline_s
        self._probe = ProbeCheck(bus, engine, status, replica, probe_margin)
        self._give_up_s = give_up_s
        self._hold = hold or Hold(bus, replica)
        self._pulling = pulling
        self._unreachable: PolicyVersion | None = None
        self._changed = asyncio.Condition()
        self._told = asyncio.Event()
        self._failing_since_s: float | None = None
        self._is_told = False
        self._wanted: PolicyUpdate | None = None
        self._after = "0"
        self._released = False
        self._lot = random.Random(replica)

    @property
    def failing(self) -> bool:
        return self._failing_since_s is not None

    @property
    def gave_up(self) -> bool:
        """Whether pulls have failed for ``give_up_s``."""
        since_s = self._failing_since_s
        return since_s is not None and time.monotonic() - since_s >= self._give_up_s

    @property
    def kept_back(self) -> bool:
        """Whether an older version than the head is kept for an evaluation."""
        newest = None if self._wanted is None else self._wanted.record.version
        held = self._hold.version
        return newest is not None and held is not None and held == self._engine.version and newest > held

    async def wait_for(self, version: PolicyVersion) -> None:
        """Wait until the engine has ``version`` or a newer one; raises NotHere if pulls keep failing."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._holds(version) or self.kept_back or self.gave_up or self._released
            )
        if not self._holds(version):
            if self._released:
                raise asyncio.CancelledError(f"the replica stops while it waits for policy version {version}")
            if self.kept_back:
                raise NotHere(f"expected policy version {version}, but an older one is kept for an evaluation")
            raise NotHere(
                f"could not pull policy version {version} for {self._give_up_s:.0f} s: {self._status.last_error}"
            )

    async def check_kept(self, version: PolicyVersion) -> None:
        """Ensure that all further tokens are of ``version``; else raises NotHere."""
        if self._hold.version != version:
            await self._hold.refresh()
        if not (self._hold.version == version == self._engine.version):
            raise NotHere(
                f"expected to answer as policy version {version} alone, found {self._engine.version} served and "
                f"{self._hold.version} kept"
            )

    async def release(self) -> None:
        self._released = True
        await self._notify()

    async def evaluated(self, is_left: Callable[[], Awaitable[bool]]) -> None:
        """Wait until the engine's version is not kept for an evaluation, or no completion of it is left to generate.

        Its results are not awaited: reward models may need this device for them.

        Args:
            is_left: whether there is a completion that this replica can generate.
        """
        while self._hold.version is not None and self._hold.version == self._engine.version:
            if not await is_left():
                return
            await asyncio.sleep(_LOOK_S)

    def refill(self) -> None:
        """Pull again if the engine's weights were discarded."""
        self._told.set()

    async def run(self) -> None:
        self._status.source = self._engine.peer_address
        for entry, update in await self.bus.newest(streams.POLICY, PolicyUpdate):
            self._after = entry
            if await self._exists(update.record):
                self._wanted = update
        await together([self._listen(), self._hold.run(self._hold_changed), self._keep_up()])

    async def _listen(self) -> None:
        while True:
            updates = await self.bus.tail(streams.POLICY, PolicyUpdate, self._after, 64, _IDLE_S)
            for self._after, update in updates:
                if await self._exists(update.record):
                    self._wanted = update
                    self._told.set()

    async def _exists(self, record: PolicyRecord) -> bool:
        """Whether it is a version of the ledger."""
        if await Ledger(self.bus).knows(record):
            return True
        log.warning("update of a nonexistent version skipped", extra={"version": int(record.version)})
        return False

    async def _hold_changed(self) -> None:
        self._told.set()
        await self._notify()

    async def _keep_up(self) -> None:
        failures = 0
        retried: PolicyUpdate | None = None
        while True:
            update = await self._next()
            errors = await self._pull(update, again=update is retried)
            if not errors:
                failures = 0
            elif update is not self._wanted and update.record.version == self._hold.version:
                self._unreachable = update.record.version
            elif await self._overtaken(update, _BACKOFF.wait_s(failures + 1)):
                WEIGHT_PULLS_OVERTAKEN.inc()
                failures = 0
            else:
                await self._note_failure(update.record.version, errors)
                retried, failures = update, failures + 1

    async def _next(self) -> PolicyUpdate:
        while True:
            self._told.clear()
            update = self._wanted
            if update is not None and not self._holds(update.record.version):
                await self._hold.refresh()  # after the update, to see the holds that it affects
                if (allowed := await self._allowed(update)) is not None:
                    return allowed
                await self._notify()
            await self._told.wait()

    async def _allowed(self, update: PolicyUpdate) -> PolicyUpdate | None:
        held = self._hold.version
        if held is None or held >= update.record.version or held == self._unreachable:
            return update
        if self._holds(held):
            return None if self._engine.version == held else update
        record = await Ledger(self.bus).policy(held)
        return update if record is None else PolicyUpdate(record, update.promoted_at_s)

    async def _overtaken(self, update: PolicyUpdate, wait_s: float | None) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._wanted is update:
                    self._told.clear()
                    await self._told.wait()
        return self._wanted is not update

    # ---------------------------------------------------------------- one version

    async def _pull(self, update: PolicyUpdate, *, again: bool) -> list[WeightsError]:
        """Try each source; return all errors, or none once the version is live."""
        errors: list[WeightsError] = []
        for attempt in await self._attempts(update, again=again):
            if errors and self._is_passed(update):
                return errors
            try:
                async with self._pulling():
                    if self._is_passed(update):  # while another process used the device
                        return [WeightsError(f"a newer version overtook version {update.record.version}")]
                    await self._pull_from(attempt, update)
                    await self._note_success(update.record)
            except WeightsError as error:
                text = f"{attempt.kind} {attempt.address}: {error}".replace(" :", ":")
                errors.append(SourceGone(text) if isinstance(error, SourceGone) else WeightsError(text))
                log.info("source failed", extra={"version": update.record.version, "error": text})
                continue
            return []
        if self._engine.torn:
            raise EngineDied(f"no source gave whole weights: {'; '.join(map(str, errors))}")
        return errors or [WeightsError("the record has neither a source nor a location")]

    def _is_passed(self, update: PolicyUpdate) -> bool:
        return self._wanted is not update and update.record.version != self._hold.version

    async def _attempts(self, update: PolicyUpdate, *, again: bool) -> list[PullAttempt]:
        told = None if again else update.sources.get(self._replica)
        if told is None and update.record.source:
            told = tuple(holders(await heartbeats(self.bus), update, self._replica, self._lot))
        return attempts(update.record, told or (), self._engine.peer_address)

    async def _pull_from(self, attempt: PullAttempt, update: PolicyUpdate) -> None:
        record, started_s, offer = update.record, time.monotonic(), None
        transport, reason = "none", "ask"
        try:
            offer = await self._ask(attempt, update)
            transport, reason = offer.transport, "receive"
            await self._engine.stage(offer)
            pull_s = time.monotonic() - started_s
            reason = "swap"
            report = await self._engine.swap(record.version)
        except WeightsError as error:
            WEIGHT_PULL_FAILURES.labels(transport, reason).inc()
            if offer is not None:
                await self._puller.finish(offer, str(error))
            raise
        await self._puller.finish(offer, None)
        _measure(attempt, record, offer, pull_s, report)

    async def _ask(self, attempt: PullAttempt, update: PolicyUpdate) -> Offer:
        record = update.record
        if attempt.kind == "file":
            return await asyncio.to_thread(file_offer, record, self._deadline_s)
        if attempt.kind == "requested_file":
            return await self._requested_file(attempt.address, update)
        return await self._puller.ask(attempt.address, record)

    async def _requested_file(self, address: str, update: PolicyUpdate) -> Offer:
        writing = asyncio.ensure_future(self._puller.ask_for_file(address, update.record))
        overtaken = asyncio.ensure_future(self._overtaken(update, None))
        try:
            await asyncio.wait([writing, overtaken], return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                raise WeightsError(f"a newer version overtook version {update.record.version} by file")
            return writing.result()
        finally:
            writing.cancel()
            overtaken.cancel()
            await asyncio.wait([writing, overtaken])

    # ---------------------------------------------------------------- outcome

    async def _note_success(self, record: PolicyRecord) -> None:
        POLICY_VERSION.set(record.version)
        self._failing_since_s, self._is_told = None, False
        self._status.version = record.version
        self._status.source = self._engine.peer_address
        self._status.start.end()
        self._status.last_error = ""
        await self._notify()
        await self._probe.check(record)

    async def _note_failure(self, version: PolicyVersion, errors: Sequence[WeightsError]) -> None:
        """Report what failed; that sources have ended only if no trainer offers the version again in time."""
        if self._failing_since_s is None:
            self._failing_since_s = time.monotonic()
        if self.gave_up or not all(isinstance(error, SourceGone) for error in errors):
            text = self._status.last_error = "; ".join(map(str, errors))
            log.warning("weights refused, the old version stays", extra={"version": version, "error": text})
            if not self._is_told:
                self._is_told = True
                await tell(self.bus, self._replica, "weights refused", text, version=int(version))
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _holds(self, version: PolicyVersion) -> bool:
        held = self._engine.version
        return held is not None and held >= version


def _measure(attempt: PullAttempt, record: PolicyRecord, offer: Offer, pull_s: float, report: SwapReport) -> None:
    WEIGHT_PULL.labels(attempt.label).observe(pull_s)
    WEIGHT_SWAP.labels(report.path).observe(report.seconds)
    WEIGHT_BYTES.labels(attempt.label).inc(offer.layout.nbytes)
    shown = {"source": attempt.label, "transport": offer.transport, "pull_s": pull_s, "swap_s": report.seconds}
    log.info("policy version live", extra={"version": record.version, "step": record.step, **shown})
