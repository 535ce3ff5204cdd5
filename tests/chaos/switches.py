"""Faults of a device that trainer, reward models and replica share: a process is killed in a switch, or hangs."""

import os
import signal
from collections.abc import Mapping

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import RUN
from penstock.shared.bus.stores.replicas.device_leases import DEVICE, Grant, Phase, look_at_devices
from tests.chaos.run import Run
from tests.support.raw_redis import raw

SHARED: Mapping[str, object] = {
    "placement.mode": "shared",
    "placement.rung": 4,
    "rollout.replicas": 1,
    "internal.claim_after_s": 5,
    "algorithm.max_lag": 0,
}
HOLDERS: tuple[tuple[str, Phase], ...] = (("trainer-0", "train"), ("rollout-0", "generate"))


async def _holder(bus: Bus) -> Grant | None:
    return (await look_at_devices(bus, 1)).grants[0]


async def _freeze(run: Run, bus: Bus, name: str, phase: Phase, *, asked: bool) -> tuple[int, int]:
    """Freeze ``name`` while it knows that it holds the device, and is asked for it or not; return its process and term."""
    first_ends = dict[int, bytes]()
    while True:
        run.check()
        held, ends = await _holder(bus), await raw(bus).hget(bus.keys.of(DEVICE.of("0")), "until_ms")
        if held is None or first_ends.setdefault(held.term, ends) == ends:
            continue  # it has not renewed this grant yet
        if not _is_held(held, phase, asked=asked):
            continue
        pid = run.pid(name)  # a busy machine may cost it its lease, after which it is another process
        if pid is None or not run.send(name, signal.SIGSTOP):
            continue
        held = await _holder(bus)
        if held is not None and _is_held(held, phase, asked=asked):
            return pid, held.term
        run.send(name, signal.SIGCONT)


def _is_held(grant: Grant | None, phase: Phase, *, asked: bool) -> bool:
    return grant is not None and grant.phase == phase and (grant.rung >= 0) == asked


async def _replaced(run: Run, name: str, pid: int) -> None:
    await run.until(lambda: run.pid(name) not in (None, pid))


async def kill(run: Run, bus: Bus, victim: str, holder: str = "rollout-0", *, asked: bool = True) -> None:
    """Kill ``victim`` while ``holder``, which does not train, has the device; ``asked``: and has not answered that it is
    asked for it.
    """
    phase: Phase = "score" if holder.startswith("reward-") else "generate"
    replica, _ = await _freeze(run, bus, holder, phase, asked=asked)
    killed = run.pid(victim)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    await _replaced(run, victim, killed)
    if victim != holder:
        os.kill(replica, signal.SIGCONT)


async def hang(run: Run, bus: Bus, name: str, phase: Phase) -> None:
    """Freeze ``name`` until another process holds its device, then wake it: it is fenced, and starts again."""
    pid = run.pid(name)
    while run.pid(name) == pid:  # a process that was just about to release its device is not fenced
        pid, term = await _freeze(run, bus, name, phase, asked=phase == "generate")

        async def followed() -> bool:
            # Of any grant: the trainer may have made its step and released the device between two looks.
            return int(await raw(bus).hget(bus.keys.of(RUN), "device_term")) > term  # noqa: B023

        async def back() -> bool:
            held = await _holder(bus)
            again = held is not None and held.replica == name and held.term > term  # noqa: B023
            return again or run.pid(name) not in (None, pid)  # noqa: B023

        await run.until(followed)
        os.kill(pid, signal.SIGCONT)
        await run.until(back)
