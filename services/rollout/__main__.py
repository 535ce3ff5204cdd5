"""Start a rollout replica: ``python -m penstock.services.rollout --config run.toml --replica rollout-0``.

If the engine spans hosts (``rollout.nodes``), run this on each with the same name; the first is the replica.
"""

import asyncio
import contextlib

from penstock.services.rollout.engines.opening import Opening
from penstock.services.rollout.engines.registry import choose, entry_of
from penstock.services.rollout.engines.vllm.start_report import followed
from penstock.shared.peers.addresses import use_interfaces
from penstock.shared.placement.turns import replica_turns
from penstock.shared.process import service
from penstock.shared.process.telemetry import tell
from penstock.shared.settings import Settings


async def run(settings: Settings, replica: str) -> None:
    """Serve until SIGTERM."""
    use_interfaces(service.own_host(settings), spans_hosts=settings.rollout.nodes > 1)
    if settings.rollout.node:
        from penstock.services.rollout.engines.vllm.entry import hold_workers

        choose(settings)
        await hold_workers(settings, replica, service.own_host(settings))
        return
    from penstock.services.rollout.service import Rollout

    async with contextlib.AsyncExitStack() as around:
        context = await around.enter_async_context(service.serve(settings, "rollout", replica))
        from penstock.services.rollout.plausibility import Plausibility
        from penstock.shared.weights.receiver.puller import Puller

        async def explain(engines: int, reason: str, slower: str) -> None:
            context.status.values["engines"] = float(engines)
            if settings.rollout.engines_per_gpu != 1:
                await tell(context.bus, replica, "engines per GPU", f"{engines}: {reason}", engines=engines)
            if slower:
                await tell(context.bus, replica, "decoder", slower)

        context.status.start.begin("importing the engine")
        now = await context.live.refresh()
        entry = entry_of(await asyncio.to_thread(choose, now))
        await entry.load()
        context.status.start.begin("waiting for the device")
        turns = await around.enter_async_context(replica_turns(context))
        while not await turns.acquire(1.0):
            if context.stop.is_set():
                return
        context.status.start.begin("loading the model")
        async with followed(context.status.start.begin):
            opening = Opening(now, replica, context.host, context.secret, explain)
            engine, codec = await entry.open_engine(opening)
        context.status.start.begin("waiting for weights")
        engine.update_by(context.live.settings.weights.update)  # may have changed during loading
        context.live.listen(lambda now: engine.update_by(now.weights.update))
        puller = Puller(engine.place, engine.ranks, settings.weights.deadline_s, context.secret)
        plausibility = Plausibility(context.bus, settings, context.live.refresh)
        rollout = Rollout(context, engine, codec, puller, turns, plausibility)
        await rollout.run(context.stop, settings.internal.heartbeat_s)


if __name__ == "__main__":
    service.leave(service.main("rollout", run))
