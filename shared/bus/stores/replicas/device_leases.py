"""Leases of shared devices: one holder at a time, each grant with the next term, which fences older ones.

::

    request ──▶ (coordinator) grant ──▶ renew, renew … ──▶ release
                              ask back ──▶ renew returns the rung ──▶ free the memory, release

A request for several devices is granted for all of them or for none, so two processes cannot wait for each other.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import Named, key

DEVICE = key(
    "device:<index>",
    "hash",
    "the run's",
    "replica, process, phase, term, rung, begin and end of a shared device's lease, and figures of the last ones",
)
REQUESTS = key("device_requests", "hash", "the run's", "replica → process, phase and devices that it requests")

Phase = Literal["train", "score", "generate"]
"""``score``: of reward models."""
_PHASES: dict[str, Phase] = {phase: phase for phase in get_args(Phase)}


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRequest:
    replica: str
    process: str
    phase: Phase
    devices: tuple[int, ...]

    @property
    def text(self) -> str:
        """Value on the bus.

        >>> DeviceRequest("trainer-0", "5f3a", "train", (0, 1)).text
        '5f3a train 0,1'
        """
        return f"{self.process} {self.phase} {','.join(map(str, self.devices))}"


@dataclasses.dataclass(frozen=True, slots=True)
class Grant:
    replica: str
    process: str
    phase: Phase
    term: int
    rung: int
    """Rung at which the coordinator asked for the device, or -1."""


@dataclasses.dataclass(frozen=True, slots=True)
class Renewal:
    term: int
    """0: it does not hold them."""
    rung: int
    switch_s: float
    """Longest switch of these devices to generation since the last training turn; 0 without one."""
    freed: int
    """Highest rung at which they were last released on request, or -1."""
    score_turns: int
    """Of reward models, since the run began."""
    score_s: float
    """Seconds of those turns."""
    offload_bytes: int
    """What the trainer has to move to the host at rung 3 for the next phase, as of those releases."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceLook:
    grants: tuple[Grant | None, ...]
    requests: tuple[DeviceRequest, ...]
    lapsed: tuple[Grant | None, ...] = ()
    """Grants that were not renewed in time, and that no other has followed."""

    @property
    def with_lapsed(self) -> "DeviceLook":
        """The same, with lapsed grants as devices that are held."""
        held = zip(self.grants, self.lapsed or self.grants, strict=True)
        return DeviceLook(tuple(grant or lapsed for grant, lapsed in held), self.requests)


async def request_devices(bus: Bus, request: DeviceRequest) -> bool:
    """Request devices; return whether they were not held already."""
    requested = await bus.script(
        "request_devices", replica=request.replica, process=request.process, request=request.text,
        devices=_keys(request.devices),
    )  # fmt: skip
    return bool(requested)


async def grant_devices(bus: Bus, leader_term: int, request: DeviceRequest, ttl_s: float) -> int:
    """Grant a request; return the grant's term, or 0 if it is outdated or a device is held."""
    term: int = await bus.script(
        "grant_devices", leader_term=leader_term, replica=request.replica, request=request.text,
        process=request.process, phase=request.phase, ttl_ms=round(ttl_s * 1000), devices=_keys(request.devices),
    )  # fmt: skip
    return term


async def renew_devices(bus: Bus, process: str, devices: Sequence[int], ttl_s: float) -> Renewal:
    term, rung, switch_ms, freed, score_turns, score_ms, offload_bytes = await bus.script(
        "renew_devices", process=process, ttl_ms=round(ttl_s * 1000), devices=_keys(devices)
    )
    return Renewal(term, rung, switch_ms / 1000, freed, score_turns, score_ms / 1000, offload_bytes)


async def ask_back(bus: Bus, leader_term: int, index: int, term: int, rung: int, offload_bytes: int = 0) -> bool:
    """Ask the grant of ``term`` to free a device; ``offload_bytes``: see :class:`Renewal`."""
    asked = await bus.script(
        "ask_back", leader_term=leader_term, device=DEVICE.of(str(index)), term=term, rung=rung,
        offload_bytes=offload_bytes,
    )  # fmt: skip
    return bool(asked)


async def release_devices(
    bus: Bus, replica: str, process: str, devices: Sequence[int], switch_s: float | None = None
) -> int:
    """Release a grant and withdraw a request; ``switch_s``: duration of the switch to the phase that ends."""
    released: int = await bus.script(
        "release_devices", replica=replica, process=process, devices=_keys(devices),
        switch_ms="" if switch_s is None else round(switch_s * 1000),
    )  # fmt: skip
    return released


async def look_at_devices(bus: Bus, count: int) -> DeviceLook:
    """Read the grants of devices 0 to ``count`` - 1, and all requests."""
    requests, rows = await bus.script("look_at_devices", devices=_keys(range(count)))
    grants, lapsed = (tuple(_grant(row, state) for row in rows) for state in (b"0", b"1"))
    return DeviceLook(grants, tuple(_requests(requests)), lapsed)


def _keys(devices: Sequence[int]) -> list[Named]:
    return [DEVICE.of(str(index)) for index in devices]


def _grant(row: Sequence[bytes], state: bytes) -> Grant | None:
    if not row or row[5] != state:
        return None
    replica, process, phase, term, rung = (cell.decode() for cell in row[:5])
    return Grant(replica, process, _phase(phase), int(term), int(rung))


def _requests(cells: Sequence[bytes]) -> Iterator[DeviceRequest]:
    for replica, text in zip(cells[::2], cells[1::2], strict=True):
        process, phase, devices = text.decode().split()
        yield DeviceRequest(replica.decode(), process, _phase(phase), tuple(map(int, devices.split(","))))


def _phase(text: str) -> Phase:
    return _PHASES.get(text, "generate")
