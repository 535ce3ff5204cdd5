"""Run the tracking service: the followers of each sink."""

import asyncio
import functools
import importlib.util
import json

from penstock.services.tracking.follower import SEPARATE, Follower, finish
from penstock.services.tracking.sink_client import SinkClient
from penstock.services.tracking.sinks.sink import TrackedRun
from penstock.shared.errors import SettingsError
from penstock.shared.extras import install_command
from penstock.shared.process.service import Context, seconds_left, serve
from penstock.shared.process.telemetry import tell
from penstock.shared.settings import Settings, flat
from penstock.shared.tasks import beside
from penstock.shared.tracked import forget_undelivered, write_undelivered

_ANSWER_S = 120.0
_EVERY_S = {"wandb": 30.0}
"""Each batch is a session of its client."""
_CLOSE_WITHIN_S = 10.0
_LOOK_S = 1.0


async def run(settings: Settings, replica: str) -> None:
    """Copy the run's records until stopped."""
    check_libraries(settings.tracking.sinks)
    tracked = tracked_run(settings)
    forget_undelivered(settings.run_folder)
    async with serve(settings, "tracking", replica) as context:
        report = functools.partial(tell, context.bus, "tracking")

        def follow(name: str, behind: Follower | None = None) -> Follower:
            sink, every_s = SinkClient(name, tracked, _ANSWER_S), _EVERY_S.get(name, 0.0)
            return Follower(name, context.bus, settings.run_folder, sink, report, every_s=every_s, behind=behind)

        sinks = [[follow(name)] for name in settings.tracking.sinks]
        for of_sink in sinks:
            if of_sink[0].name in SEPARATE:
                of_sink.append(follow(of_sink[0].name, behind=of_sink[0]))
        followers = [follower for of_sink in sinks for follower in of_sink]
        context.status.state = "working"
        async with beside(_watch(context, sinks), *(follower.run(context.stop) for follower in followers)):
            await context.stop.wait()
        context.status.state = "stopping"
        within_s = max(_CLOSE_WITHIN_S, seconds_left() - _CLOSE_WITHIN_S)
        await asyncio.gather(*(finish(of_sink, within_s) for of_sink in sinks))
        write_undelivered(settings.run_folder, _undelivered(sinks))


def _undelivered(sinks: list[list[Follower]]) -> dict[str, str]:
    reasons = [(of_sink[0].name, list(filter(None, (each.undelivered for each in of_sink)))) for of_sink in sinks]
    return {name: whys[0] for name, whys in reasons if whys}


async def _watch(context: Context, sinks: list[list[Follower]]) -> None:
    followers = [follower for of_sink in sinks for follower in of_sink]
    while True:
        troubles = [f"{follower.name}: {follower.trouble}" for follower in followers if follower.trouble]
        context.status.last_error = "; ".join(troubles)
        context.status.values |= {f"delivered_{first.name}": float(first.delivered) for first, *_ in sinks}
        await asyncio.sleep(_LOOK_S)


def check_libraries(sinks: tuple[str, ...]) -> None:
    for name in sinks:
        if importlib.util.find_spec(name) is None:
            raise SettingsError(
                f"expected the package {name} for tracking.sinks, found none: {install_command(name)}, or change tracking.sinks"
            )


def tracked_run(settings: Settings) -> TrackedRun:
    """Return the run as trackers show it, without the bus's address and test settings."""
    values = settings.model_dump(mode="json", exclude={"bus", "internal", "coordinator", "tracking"})
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat(values).items()}
    return TrackedRun(settings.run.id, settings.tracking.project, settings.run_folder, texts)
