"""GPUs that a process holds, for GPU-hours. It asks no driver and imports no torch."""

import re
from collections.abc import Mapping
from pathlib import Path

from penstock.shared.settings import Settings

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"nvidia(\d+)")


def visible_names(environment: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that processes with ``environment`` see, by number or UUID, in order; None: all."""
    chosen = environment.get(VISIBLE)
    return None if chosen is None else [name for name in map(str.strip, chosen.split(",")) if name]


def held_gpus(
    settings: Settings, service: str, environment: Mapping[str, str], devices: Path = Path("/dev")
) -> tuple[str, ...]:
    """Return the GPUs that a replica of ``service`` holds, on all of its hosts.

    On this host they are those in ``CUDA_VISIBLE_DEVICES``, else all that are visible, as in a pod.
    """
    if settings.run.device == "cpu" or not _uses_gpus(settings, service):
        return ()
    own = _visible(visible_names(environment), devices)
    hosts = {"trainer": settings.trainer.nodes, "rollout": settings.rollout.nodes}.get(service, 1)
    return (*own, *(f"{host}:{number}" for host in range(1, hosts) for number in own))


def _uses_gpus(settings: Settings, service: str) -> bool:
    if service == "reward":
        return any(scorer.kind == "model" for scorer in settings.reward.scorers)
    return service in ("trainer", "rollout")


def _visible(chosen: list[str] | None, devices: Path) -> list[str]:
    names = chosen
    if names is None:
        names = [match[1] for path in devices.glob("nvidia*") if (match := _DEVICE.fullmatch(path.name))]
    return sorted(set(names) - {"-1"})
