"""Choose the strongest tier in which a harmless program runs and every escape fails (docs/sandbox.md, "Tiers")."""

import logging

from penstock.services.reward.executor import escapes
from penstock.services.reward.executor.executor import Executor
from penstock.services.reward.executor.inside import confinement
from penstock.services.reward.executor.isolation import Interpreter, Isolation, candidates
from penstock.services.reward.executor.slots import RESIDENT_PER_SLOT, SESSIONS_PER_SLOT, count
from penstock.services.reward.executor.zygote_process import ZygoteLost
from penstock.shared.errors import SettingsError
from penstock.shared.settings.rewards.reward import ExecutorSettings

log = logging.getLogger(__name__)

_ORDER = ("namespace", "landlock")
_OLDEST_LANDLOCK = 3
_USER_ID = 65_534
"""User of programs if root starts the executor."""
_NO_LANDLOCK = (
    "this kernel does not offer Landlock, which both tiers need: run Linux 6.2 or newer with `landlock` in its lsm= list, and in a container "
    "with a seccomp profile that allows landlock_*. "
)
_ADVICE = "docs/sandbox.md says what each tier needs (reward.executor.isolation)"


async def start(
    settings: ExecutorSettings, profiles: tuple[str, ...], targets: escapes.EscapeTargets, recycle_after: int
) -> Executor:
    interpreter = Interpreter.find(settings.interpreter)
    if "numpy" in profiles and not interpreter.numpy:
        raise SettingsError(
            f"{interpreter.program} has no numpy: change reward.executor.interpreter, or profile in [[reward.scorers]]"
        )
    reasons: list[str] = []
    for tier in _ORDER if settings.isolation == "auto" else (settings.isolation,):
        try:
            programs = (RESIDENT_PER_SLOT + SESSIONS_PER_SLOT) * slots(settings)
            ways = candidates(tier, interpreter, _USER_ID, programs)
        except SettingsError as error:
            reasons.append(f"{tier}: {error}")
            continue
        for way in ways:
            executor = Executor(way, profiles, slots(settings), recycle_after)
            failure = await _failures(executor, way, profiles, targets)
            if not failure:
                return executor
            await executor.close()
            reasons.append(f"{tier}: {failure}")
    listed = "".join(f"\n  {reason}" for reason in dict.fromkeys(reasons))
    raise SettingsError(f"no isolation tier works on this host:{listed}\n{_advice()}")


def slots(settings: ExecutorSettings) -> int:
    return min(settings.slots or count(), count())


def _advice() -> str:
    try:
        return _ADVICE if confinement.landlock_abi() >= _OLDEST_LANDLOCK else _NO_LANDLOCK + _ADVICE
    except OSError:
        return _NO_LANDLOCK + _ADVICE


async def _failures(
    executor: Executor, way: Isolation, profiles: tuple[str, ...], targets: escapes.EscapeTargets
) -> str:
    try:
        await executor.start()
    except (ZygoteLost, OSError) as error:
        return f"cannot be started: {error}"
    for profile in profiles:
        failure = escapes.works(await executor.run(escapes.harmless(profile)))
        if not failure and way.tier != "unsafe":
            failure = await _escape(executor, profile, targets)
        if failure:
            return f"profile {profile}: {failure}"
    return ""


async def _escape(executor: Executor, profile: str, targets: escapes.EscapeTargets) -> str:
    for name in escapes.NAMES:
        got = escapes.escaped(await executor.run(targets.job(name, profile)))
        if got:
            return f"a program that tries to {name} was not contained: {got}"
    return ""
