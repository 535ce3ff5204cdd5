"""A process's memory timeline: samples of what it holds on each device, by component and phase.

A process notes a sample at the end of each phase; reports keep the largest of each phase since the last one, and become
rarer the longer the process runs, so that their number stays small.
"""

import contextlib
import dataclasses
import math
import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from prometheus_client import Gauge

from penstock.shared.bus.messages import MemoryReport, MemorySample

if TYPE_CHECKING:
    import torch

MEMORY = Gauge(
    "penstock_memory_bytes",
    "Memory held on a device in the largest phase of late, by component.",
    ["device", "component"],
)
ACTIVATIONS, OTHER = "activations", "other"
_SOONEST_S, _LATEST_S = 1.0, 60.0
_SHARE = 0.01
"""Of the process's life, that is the time between reports."""


def host_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[float, float]:
    """Return the host's memory, in all and available, or what is left to this container if that is less."""
    memory = psutil.virtual_memory()
    total_bytes, free_bytes = float(memory.total), float(memory.available)
    with contextlib.suppress(OSError, ValueError):  # no container, or without a limit ("max")
        limit_bytes = float(int((cgroup / "memory.max").read_text()))
        used_bytes = float(int((cgroup / "memory.current").read_text()))
        figures = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        total_bytes = min(total_bytes, limit_bytes)
        free_bytes = min(free_bytes, limit_bytes - used_bytes + float(figures.get("inactive_file", 0)))
    return total_bytes, max(0.0, free_bytes)


def place_of(device: "torch.device") -> tuple[str, float]:
    """Return a device's name, of all hosts' different, and its bytes."""
    if device.type != "cuda":
        return f"{socket.gethostname()} cpu", host_bytes()[0]
    import torch

    properties = torch.cuda.get_device_properties(device)
    return f"{socket.gethostname()} GPU-{str(properties.uuid).removeprefix('GPU-')[:8]}", float(properties.total_memory)


def resident_bytes() -> float:
    """Return what this process holds in the host's memory."""
    return float(psutil.Process().memory_info().rss)


def used_bytes(device: "torch.device") -> float:
    if device.type != "cuda":
        return resident_bytes()
    import torch

    return float(torch.cuda.memory_allocated(device))


def peak_bytes(device: "torch.device") -> float:
    """Return the most that this process has held on ``device`` so far; of a host, what it holds now."""
    if device.type != "cuda":
        return resident_bytes()
    import torch

    return float(torch.cuda.max_memory_allocated(device))


def sample(
    place: tuple[str, float],
    phase: str,
    seconds: float,
    components: Mapping[str, float],
    total_bytes: float,
    rest: str = OTHER,
) -> MemorySample:
    """Return a sample that ends now; ``rest`` names what ``components`` leave of ``total_bytes``."""
    parts = {name: nbytes for name, nbytes in components.items() if nbytes > 0}
    left = total_bytes - sum(parts.values())
    if left > 0:
        parts[rest] = parts.get(rest, 0.0) + left
    name, capacity_bytes = place
    return MemorySample(name, phase, time.time(), seconds, sum(parts.values()), capacity_bytes, parts)


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What one process holds on a device now."""

    place: tuple[str, float]
    """See :func:`place_of`."""
    components: Mapping[str, float]
    total_bytes: float
    rest: str = OTHER
    """Name of what the components leave of the total."""
    peak_bytes: float = 0.0
    """The most that the process has held there, where it is measured."""

    def during(self, phase: str, seconds: float) -> MemorySample:
        """Return it as a sample of ``phase``, which ends now."""
        return sample(self.place, phase, seconds, self.components, self.total_bytes, self.rest)

    def without(self, names: Collection[str]) -> "Held":
        """Return it without components that are away from the device, although the process still counts them."""
        kept = {name: nbytes for name, nbytes in self.components.items() if name not in names}
        away_bytes = sum(self.components.values()) - sum(kept.values())
        return dataclasses.replace(self, components=kept, total_bytes=max(0.0, self.total_bytes - away_bytes))


class MemoryTimeline:
    """Samples that wait for the next report; on the event loop."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._reported_s = -math.inf
        self._waiting: dict[tuple[int, str, str], MemorySample] = {}

    def note(self, noted: MemorySample, rank: int = 0) -> None:
        """Keep ``noted``, of one of this replica's processes, if it is the largest of its device and phase."""
        key = (rank, noted.device, noted.phase)
        known = self._waiting.get(key)
        if known is None or noted.total_bytes >= known.total_bytes:
            self._waiting[key] = noted

    def take(self, replica: str) -> list[MemoryReport]:
        """Return a report for each process of ``replica`` if they are due."""
        now_s = time.monotonic()
        pause_s = min(max(_SHARE * (now_s - self._started_s), _SOONEST_S), _LATEST_S)
        if not self._waiting or now_s - self._reported_s < pause_s:
            return []
        self._reported_s = now_s
        waiting, self._waiting = self._waiting, {}
        _export(max(waiting.values(), key=lambda noted: noted.total_bytes))
        return [
            MemoryReport(f"{replica}.{rank}" if rank else replica, _of(waiting, rank))
            for rank in sorted({key[0] for key in waiting})
        ]


def _of(waiting: Mapping[tuple[int, str, str], MemorySample], rank: int) -> tuple[MemorySample, ...]:
    own = [noted for key, noted in waiting.items() if key[0] == rank]
    return tuple(sorted(own, key=lambda noted: noted.ended_at_s))


def _export(largest: MemorySample) -> None:
    MEMORY.clear()
    for component, nbytes in largest.components.items():
        MEMORY.labels(largest.device, component).set(nbytes)
