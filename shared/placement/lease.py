"""One process's lease of the devices that it shares, for one phase: training, scoring or generation.

::

    acquire ──▶ (the coordinator grants) ──▶ work, confirm at each boundary ──▶ release
                     asked ◀── another phase waits: free memory down to ``rung``, then release

``keep`` renews in the background. If another process was granted a device meanwhile, this one is fenced and ends.
Without devices (``placement.mode = "separate"``) every call returns at once.
"""

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.replicas.device_leases import (
    DeviceRequest,
    Phase,
    Renewal,
    release_devices,
    renew_devices,
    request_devices,
)
from penstock.shared.errors import BusUnavailable, Fenced, SettingsError
from penstock.shared.placement.devices import devices_of
from penstock.shared.process.service import Context
from penstock.shared.tasks import beside

_LOOK_S = 0.03
_LEAVE_S = 1.0


class DeviceLease:
    """``replica``: its name; a restart ends the grants of its predecessor. ``ttl_s``: lifetime without renewal."""

    def __init__(self, bus: Bus, replica: str, phase: Phase, devices: Sequence[int] = (), ttl_s: float = 30.0) -> None:
        self._bus = bus
        self._request = DeviceRequest(replica, uuid.uuid4().hex[:8], phase, tuple(devices))
        self._ttl_s = ttl_s
        self._busy = asyncio.Lock()
        self._granted, self._asked = asyncio.Event(), asyncio.Event()
        self._requested_s: float | None = None
        self.term = 0
        """Fencing token; 0 while not held."""
        self.rung = -1
        """Rung down to which memory must be free before the release; -1: not asked."""
        self.freed = -1
        """Rung at which the holder before released the devices, or -1."""
        self.offload_bytes = 0
        """What the trainer has to move to the host after its turn at rung 3, as asked from the holder before."""
        self.switch_s = 0.0
        """As of the newest grant: see :class:`Renewal`."""
        self._switches: dict[str, float] = {}
        self._scored: tuple[int, float] | None = None
        """Turns of reward models before the newest grant, and their seconds."""

    @property
    def is_shared(self) -> bool:
        return bool(self._request.devices)

    @property
    def held(self) -> bool:
        """Whether the devices are held, as far as is known."""
        return self.term > 0 or not self.is_shared

    async def keep(self) -> None:
        """Raises Fenced: another process was granted a device."""
        while self.is_shared:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Renew once; request again what is awaited, as a grant may have lapsed unseen; may raise Fenced."""
        await self.confirm()
        async with self._busy:
            if not self.term and self._requested_s is not None:
                await request_devices(self._bus, self._request)

    async def acquire(self, wait_s: float = math.inf) -> bool:
        """Wait until the devices are granted; return whether they were within ``wait_s``."""
        if self.held:
            return True
        if self._requested_s is None:
            async with self._busy:
                await request_devices(self._bus, self._request)
                self._requested_s = time.perf_counter()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if wait_s == math.inf else wait_s):
                await self._granted.wait()
        return self.held

    async def asked(self) -> int:
        """Wait until the devices are asked back; return the rung."""
        await self._asked.wait()
        return self.rung

    async def confirm(self) -> None:
        """Raises Fenced: they are not."""
        if not self.is_shared:
            return
        async with self._busy:
            renewal = await renew_devices(self._bus, self._request.process, self._request.devices, self._ttl_s)
            if self.term and renewal.term != self.term:
                raise Fenced(
                    f"expected to hold the devices {list(self._request.devices)} under term {self.term}, found that the lease ended: "
                    "another process holds them, and this one starts again"
                )
            if renewal.term and not self.term:
                self._take(renewal)
            if renewal.rung >= 0 and self.term:
                self.rung = renewal.rung
                self._asked.set()

    def _take(self, renewal: Renewal) -> None:
        asked_s, self._requested_s = self._requested_s, None
        self.term, self.freed, self.switch_s = renewal.term, renewal.freed, renewal.switch_s
        self.offload_bytes = renewal.offload_bytes
        waited_s = 0.0 if asked_s is None else time.perf_counter() - asked_s
        self._switches = {
            "switches": self._switches.get("switches", 0.0) + 1,
            "switch_train_s": self._switches.get("switch_train_s", 0.0) + waited_s,
            "switch_generate_s": self._switches.get("switch_generate_s", 0.0) + renewal.switch_s,
            "switch_rung": float(max(0, renewal.freed)),
            **self._score_turns(renewal),
        }
        self._granted.set()

    def _score_turns(self, renewal: Renewal) -> dict[str, float]:
        before, self._scored = self._scored, (renewal.score_turns, renewal.score_s)
        if not renewal.score_turns:
            return {}
        turns, seconds = before or self._scored
        return {
            "score_turns": self._switches.get("score_turns", 0.0) + renewal.score_turns - turns,
            "score_turn_s": self._switches.get("score_turn_s", 0.0) + renewal.score_s - seconds,
        }

    def take_switches(self) -> dict[str, float]:
        """Return figures of the switches since the last call: number, seconds to this phase and back, newest rung; and
        of reward models' turns.
        """
        switches, self._switches = self._switches, {}
        return switches

    async def release(self, switch_s: float | None = None) -> None:
        """As :func:`release_devices`."""
        if not self.is_shared:
            return
        async with self._busy:
            self.term, self.rung, self._requested_s = 0, -1, None
            self._granted.clear()
            self._asked.clear()
            request = self._request
            await release_devices(self._bus, request.replica, request.process, request.devices, switch_s)


def lease_of(context: Context, phase: Phase) -> DeviceLease:
    """Return the lease of the devices that a service shares, of none if it has its own.

    Raises:
        SettingsError: no devices belong to its replica's name.
    """
    settings, service = context.settings, context.service
    devices = devices_of(settings, service, context.replica)
    shares = settings.scores_in_turns if phase == "score" else bool(settings.shared_devices)
    if shares and not devices:
        last = settings.reward.replicas - 1 if phase == "score" else settings.rollout.replicas - 1
        names = f"{service}-0" if not last else f"{service}-0 to {service}-{last}"
        raise SettingsError(
            f'expected a replica that is named {names} with placement.mode = "shared", where each uses the devices of its '
            f"trainer ranks in turn, found {context.replica!r}: change --replica"
        )
    return DeviceLease(context.bus, context.replica, phase, devices, settings.internal.claim_after_s)


@contextlib.asynccontextmanager
async def leased(lease: DeviceLease, *, until_the_end: bool = False) -> AsyncIterator[DeviceLease]:
    """Keep ``lease`` during the block, and release it afterwards; not after an error, as memory is freed only when the
    process has ended: its restart ends the grant, or the grant lapses.

    Args:
        until_the_end: so it is without an error; a mere request is withdrawn.
    """
    failed = False
    try:
        async with beside(lease.keep()):
            yield lease
    except BaseException as error:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        failed = isinstance(error, Exception)
        raise error from None
    finally:
        if not (failed or (until_the_end and lease.held)):
            with contextlib.suppress(TimeoutError, BusUnavailable):
                async with asyncio.timeout(_LEAVE_S):
                    await lease.release()
