"""GPUs that a process holds, for GPU-hours. It asks no driver and imports no torch."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from shared.settings import Settings

_DEVICE = re.compile(r"nvidia(\d+)")


def held_gpus(
    settings: Settings, service: str, environment: Mapping[str, str], devices: Path = Path("/dev")
) -> tuple[str, ...]:
    """Return the GPUs that a replica of ``service`` holds, on all of its hosts.

    On this host they are those in ``CUDA_VISIBLE_DEVICES``, else all that are visible, as in a pod.
    """
    if settings.run.device == "cpu" or not _uses_gpus(settings, service):
        return ()
    own = _visible(environment.get("CUDA_VISIBLE_DEVICES"), devices)
    hosts = {"trainer": settings.trainer.nodes, "rollout": settings.rollout.nodes}.get(service, 1)
    return (*own, *(f"{host}:{number}" for host in range(1, hosts) for number in own))


def _uses_gpus(settings: Settings, service: str) -> bool:
    if service == "reward":
        return any(scorer.kind == "model" for scorer in settings.reward.scorers)
    return service in ("trainer", "rollout")


def _visible(chosen: str | None, devices: Path) -> list[str]:
    names: Iterable[str]
    if chosen is not None:
        names = (name.strip() for name in chosen.split(","))
    else:
        names = (match[1] for path in devices.glob("nvidia*") if (match := _DEVICE.fullmatch(path.name)))
    return sorted({name for name in names if name and name != "-1"})
