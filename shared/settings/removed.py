"""Settings that no longer exist: dotted key → what replaced it. Scorers' keys are written `reward.scorers[KIND].NAME`."""

from collections.abc import Mapping, Sequence

_GUARDS = "guards.pause and guards.off list the guards that pause the run and those that are turned off; "
REMOVED: Mapping[str, str] = {
    "guards.no_signal": _GUARDS + "guards.steps is the number of steps",
    "guards.kl": _GUARDS + "the ceilings are guards.kl_nats and guards.reference_kl_nats",
    "guards.entropy": _GUARDS + "the floor is guards.entropy_nats",
    "guards.lag": _GUARDS + "the largest share is guards.stale_share",
    "guards.throughput": _GUARDS + "the smallest share is guards.throughput_share",
    "guards.trainer_starving": _GUARDS + "the largest share is guards.starving_share",
    "guards.rollouts_starving": _GUARDS + "the largest share is guards.starving_share",
    "guards.unscored": _GUARDS + "the number of groups is guards.unscored_groups",
    "guards.probe": _GUARDS + 'the guard is called "probe" there',
    "guards.stalled": _GUARDS + "the number of seconds is guards.stalled_s",
}


def replacement(where: Sequence[str | int]) -> str:
    """Return what replaced the setting at ``where``, a path of pydantic's; "" if it never existed.

    >>> replacement(("guards", "probe"))[-33:]
    'the guard is called "probe" there'
    """
    return REMOVED.get(dotted(where), "")


def dotted(where: Sequence[str | int]) -> str:
    """Return the key of a setting as `penstock settings` writes it.

    >>> dotted(("reward", "scorers", 0, "judge", "backoff_s"))
    'reward.scorers[judge].backoff_s'
    """
    key, after_index = "", False
    for part in where:
        if isinstance(part, str):
            key += f"[{part}]" if after_index else f".{part}"
        after_index = isinstance(part, int)
    return key.removeprefix(".")
