"""Which process uses which devices, by the settings."""

from penstock.shared.settings import Settings


def devices_of(settings: Settings, service: str, replica: str) -> tuple[int, ...]:
    """Return the devices, by trainer rank, that a process uses in turn with others; none if it shares none.

    >>> settings = Settings.model_validate({"placement": {"mode": "shared"}, "rollout": {"replicas": 1}})
    >>> devices_of(settings, "rollout", "rollout-0"), devices_of(settings, "rollout", "rollout-1")
    ((0,), ())
    """
    shared = tuple(settings.shared_devices)
    if service == "trainer":
        return shared
    each = {"rollout": settings.rollout.vllm.tensor_parallel_size, "reward": 1}[service]
    if service == "reward":
        shared = shared[:1] if settings.scores_in_turns else ()
    numbers = range(len(shared) // each)
    return next(
        (shared[number * each : (number + 1) * each] for number in numbers if replica == f"{service}-{number}"), ()
    )


def gpus_of(settings: Settings, service: str, replica: str) -> tuple[int, ...]:
    """Return the GPUs that a process sees, as the settings number them; none: all of them."""
    if service == "trainer":
        return settings.trainer.gpus
    if service not in ("rollout", "reward"):
        return ()
    if devices := devices_of(settings, service, replica):
        gpus = tuple(settings.trainer.gpus or settings.shared_devices)
        return tuple(gpus[device] for device in devices)
    section, index = getattr(settings, service), int(replica.rpartition("-")[2])
    each = len(section.gpus) // section.replicas
    return tuple(section.gpus[index * each : (index + 1) * each])
