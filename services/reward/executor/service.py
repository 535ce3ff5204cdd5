"""The executor process: choose a tier, serve, re-check isolation, stop in order.

``/readyz`` reports the tier, and fails after a failed check.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import math
import os
import signal
from collections.abc import Mapping

from prometheus_client import Gauge

from penstock.services.reward.executor import escapes, probe
from penstock.services.reward.executor.executor import Executor
from penstock.services.reward.executor.server import serve
from penstock.shared.bus.messages import Json
from penstock.shared.executor.client import read_executor_secret
from penstock.shared.process.endpoints import Endpoints
from penstock.shared.process.service import own_host
from penstock.shared.settings import ENVIRONMENT_PREFIX, Settings

log = logging.getLogger(__name__)

INFO = Gauge("penstock_executor_info", "1 for the tier in which programs run.", ["tier"])
CONTAINED = Gauge(
    "penstock_executor_contained", "1 while the newest escape attempt was contained, else 0; NaN before the first."
)
CONTAINED.set(math.nan)  # not yet checked
DEFAULT_ADDRESS = "127.0.0.1:0"
_MAX_WAITING = 1024
"""Maximum programs of one connection, waiting or running. A reward replica sends 64."""


@dataclasses.dataclass(slots=True)
class ExecutorHealth:
    tier: str = ""
    address: str = ""
    ready: bool = False
    reason: str = "starting"

    def checks(self) -> Mapping[str, Json]:
        return {name: getattr(self, name) for name in ("ready", "tier", "address", "reason")}


async def run(settings: Settings) -> None:
    stop, health = asyncio.Event(), ExecutorHealth()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    _warn_of_secrets()
    chosen, profiles = settings.reward.executor, settings.executor_profiles
    secret = read_executor_secret(chosen)
    endpoints = Endpoints(own_host(settings), settings.run.metrics_port, "run.metrics_port", health.checks)
    try:
        with escapes.targets() as targets:
            executor = await probe.start(chosen, profiles, targets, settings.internal.executor_recycle_after)
            try:
                health.tier = executor.tier
                INFO.labels(executor.tier).set(1)
                async with serve(executor, chosen.address or DEFAULT_ADDRESS, _MAX_WAITING, secret) as address:
                    health.address = address
                    _tell(executor.tier, address, endpoints.address)
                    await _check(executor, profiles, targets, settings.internal.executor_check_s, health, stop)
            finally:
                await executor.close()
    finally:
        endpoints.close()


async def _check(
    executor: Executor,
    profiles: tuple[str, ...],
    targets: escapes.EscapeTargets,
    every_s: float,
    health: ExecutorHealth,
    stop: asyncio.Event,
) -> None:
    health.ready, health.reason = True, ""
    CONTAINED.set(1)
    for name, profile in itertools.cycle(itertools.product(escapes.NAMES, profiles)):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await stop.wait()
        if stop.is_set():
            return
        failure = escapes.works(await executor.run(escapes.harmless(profile)))
        if not failure and executor.tier != "unsafe":
            failure = escapes.escaped(await executor.run(targets.job(name, profile)))
        if failure:
            log.error("the check failed", extra={"check": name, "profile": profile, "reason": failure})
        health.ready, health.reason = not failure, failure
        CONTAINED.set(not failure)


def _tell(tier: str, address: str, metrics: str) -> None:
    extra = {"tier": tier, "address": address, "metrics": metrics}
    if tier == "unsafe":
        log.warning('programs run WITHOUT ISOLATION: reward.executor.isolation = "unsafe"', extra=extra)
    else:
        log.info("programs run isolated", extra=extra)


def _warn_of_secrets() -> None:
    names = sorted(name for name in os.environ if name.startswith(f"{ENVIRONMENT_PREFIX}BUS"))
    if names:
        log.warning("the executor needs no bus: leave these out of its environment", extra={"names": names})
