"""Scripted replicas of :mod:`benchmarks.bus.fleet`: many of them are tasks of one process.

A working replica is a real ``Worker`` whose samples end after a drawn time, each with a hand-over of its own. An idle one
is a real rollout service that is given nothing to do, with its heartbeats.
"""

import argparse
import asyncio
import contextlib
import functools
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Sequence

from penstock.shared.bus.assembly import bare
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Prompt, RolloutGroup
from penstock.shared.bus.streams import PROMPTS, ROLLOUTS
from penstock.shared.bus.worker import HandOver, Patience, Worker
from penstock.shared.process.parent import die_with
from tests.support import builders

SAMPLES = 8
"""Of a group."""


class Decoding:
    """Samples that end ``seconds`` after they begin, on average; the first ones as if begun before. Begins and ends are
    printed, for the audit.
    """

    def __init__(self, name: str, seconds: float, room: int, hurried: asyncio.Event) -> None:
        self._name, self._seconds, self._hurried = name, seconds, hurried
        self._first = room / SAMPLES
        self._lot = random.Random(name)

    async def alone(self, prompt: Prompt) -> RolloutGroup:
        place = prompt.sample or 0
        self._note("begin", prompt, [place])
        await self._wait(self._draw())
        self._note("end", prompt, [place])
        return _part(prompt, (place,))

    async def together(self, prompt: Prompt, places: Sequence[int], hand_over: HandOver) -> None:
        """End the samples one after another; all that are left at once when hurried."""
        self._note("begin", prompt, places)
        ends = sorted((time.monotonic() + self._draw(), place) for place in places)
        while ends:
            await self._wait(ends[0][0] - time.monotonic())
            count = len(ends) if self._hurried.is_set() else 1
            ended, ends = tuple(place for _, place in ends[:count]), ends[count:]
            self._note("end", prompt, ended)
            await hand_over(_part(prompt, tuple(sorted(ended))))

    def _draw(self) -> float:
        if self._first > 1e-6:
            self._first -= 1 / SAMPLES
            return self._seconds * self._lot.random()
        return self._seconds * self._lot.uniform(0.5, 1.5)

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._hurried.wait()

    def _note(self, event: str, prompt: Prompt, places: Sequence[int]) -> None:
        names = ",".join(map(str, places))
        sys.stdout.write(f"{event} {time.time():.3f} {self._name} {prompt.group_id} {names}\n")
        sys.stdout.flush()


def _part(prompt: Prompt, places: tuple[int, ...]) -> RolloutGroup:
    made = builders.group(prompt.group_id, ("46",) * len(places))
    return RolloutGroup(bare(prompt), made.prompt_token_ids, made.samples, made.replica, 2.0, 3.0, places=places)


async def work(url: str, name: str, given: argparse.Namespace, hurried: asyncio.Event, stop: asyncio.Event) -> None:
    """Be a replica that generates."""
    bus = await Bus.connect(url, "fleet", wait_s=600.0)
    bus.wait_for_ever()
    decoding = Decoding(name, given.seconds, given.room, hurried)
    worker = Worker(
        bus, name, PROMPTS, Prompt, ROLLOUTS, decoding.alone, given.room, Patience(given.claim_after_s, drain_s=0.0),
        together=decoding.together, unit=SAMPLES,
    )  # fmt: skip
    await worker.run(stop)
    await bus.close()


async def idle(url: str, name: str, stop: asyncio.Event) -> None:
    """Be a rollout service without work."""
    from penstock.services.rollout.engines.prompts import CharacterCodec
    from penstock.services.rollout.engines.scripted import ScriptedEngine
    from penstock.services.rollout.service import Rollout
    from penstock.shared.bus.stores.replicas.heartbeats import Heard
    from penstock.shared.process.telemetry import Presence, Status
    from penstock.shared.settings import Settings
    from penstock.shared.weights.receiver.puller import Puller
    from tests.support import replicas

    bus = await Bus.connect(url, "fleet", wait_s=600.0)
    bus.wait_for_ever()
    settings, status, engine = Settings.model_validate({}), Status(), ScriptedEngine()
    made = replicas.context(settings, bus, name, status)

    async def hear(heard: Heard) -> None:
        made.cordon.hear(heard.order)
        await made.live.hear(heard.revision)
        await made.secret.hear(heard.secret)

    puller = Puller(engine.place, engine.ranks, 5.0, made.secret)
    rollout = Rollout(made, engine, CharacterCodec(), puller, replicas.own_device(made))
    presence = Presence(bus, "rollout", name, settings.internal.heartbeat_s, status, hear)
    beating = asyncio.create_task(presence.run(stop))
    await rollout.run(stop, settings.internal.heartbeat_s)
    await beating
    await bus.close()


async def play(given: argparse.Namespace) -> None:
    """Run the replicas until SIGTERM; SIGUSR1 ends all samples that are begun."""
    stop, hurried = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, hurried.set)
    names = [f"rollout-{number}" for number in range(given.first, given.first + given.replicas)]
    play_one = idle if given.idle else functools.partial(work, given=given, hurried=hurried)
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(play_one(given.url, name, stop=stop))
            await asyncio.sleep(0.005)
        sys.stdout.write("playing\n")
        sys.stdout.flush()


def main() -> None:
    """Play."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first replica")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--room", type=int, default=256, help="samples of a replica")
    parser.add_argument("--seconds", type=float, default=300.0, help="mean time of a sample")
    parser.add_argument("--claim-after-s", type=float, default=30.0)
    parser.add_argument("--idle", action="store_true")
    die_with(os.getppid(), signal.SIGKILL)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(play(parser.parse_args()))


if __name__ == "__main__":
    main()
