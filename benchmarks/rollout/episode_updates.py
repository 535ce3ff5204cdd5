"""What updates of weights cost 256 tool loops: tokens/s with an update every 2 s beside none.

    python -m benchmarks.rollout.episode_updates                              one GPU, a 0.5B shape in bfloat16
    python -m benchmarks.rollout.episode_updates --device cpu --episodes 8 --seconds 20 --rounds 1

::

    trainer's process: fill snapshot, offer ──── pull ────▶ stage (decoding continues), verify, swap
    256 episodes ──▶ tree, renderer ──▶ Replicas ── peer connection ──▶ TurnListener ──▶ vLLM in this process

Random weights without a stop token: a turn is ``TOKENS`` tokens, a tool's answer follows, and after ``TURNS`` turns another
episode begins. Windows with updates and without alternate; tokens are counted by vLLM, over what is left of a window after
its first second. ``ratio`` is the median of neighbours'. ``cached`` is the share of tokens before turns that the prefix cache
had. The last line is one JSON object.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES
from benchmarks.weights.measures import EVERY_S, Player
from benchmarks.weights.play import play
from benchmarks.weights.players import Options, environment
from benchmarks.weights.update import configure

TURNS, TOKENS, TOOL_WORDS = 6, 128, 40
LEAD_S = 1.0


class Load:
    """Episodes that are played by a replica in this process."""

    def __init__(self, engine: Any, episodes: int) -> None:
        self._engine, self._episodes = engine, episodes
        self.turns = self.before = self.cached = 0

    @contextlib.asynccontextmanager
    async def playing(self, url: str) -> AsyncIterator[None]:
        """Play until the body ends, which begins once each episode has had a turn."""
        from penstock.services.episodes.replicas import Replicas
        from penstock.services.rollout.engines.prompts import CharacterCodec
        from penstock.services.rollout.episode_turns import TurnListener
        from penstock.shared.bus.bus import Bus
        from penstock.shared.process.telemetry import Presence, Status
        from penstock.shared.settings import Settings
        from tests.support import replicas

        bus, status = await Bus.connect(url, "updates", wait_s=60.0), Status()
        settings = Settings.model_validate({"run": {"host": "127.0.0.1"}, "algorithm": {"max_lag": 1000}})
        context = replicas.context(settings, bus, "rollout-0", status)
        await context.secret.refresh()
        status.version, status.state = self._engine.version, "working"

        async def draw(request: Any, least: Any, purpose: Any) -> Any:
            status.version = self._engine.version
            return await self._engine.generate(request)

        listener = TurnListener(context, self._engine, CharacterCodec(), draw)
        known = Replicas(bus, context.secret)
        around = [listener.run(), known.run(), Presence(bus, "rollout", "rollout-0", 0.2, status).run(asyncio.Event())]
        tasks = [asyncio.create_task(each) for each in around]
        tasks += [asyncio.create_task(self._play(number, known)) for number in range(self._episodes)]
        try:
            while self.turns < self._episodes:
                await asyncio.sleep(0.1)
                for task in tasks:
                    if task.done():
                        task.result()
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await bus.close()

    async def _play(self, number: int, known: Any) -> None:
        from penstock.services.episodes.answers import AnswerParser
        from penstock.services.episodes.episode import Episode, Limits
        from penstock.services.episodes.messages import Message
        from penstock.services.episodes.renderer import Renderer
        from penstock.services.episodes.service import Drawing
        from tests.support import builders
        from tests.support.chat_tokenizers import family

        tokenizer = family("qwen3")
        renderer, parser = Renderer(tokenizer), AnswerParser(tokenizer, {})
        while True:
            made = builders.prompt(number)
            prompt = dataclasses.replace(made, sampling=dataclasses.replace(made.sampling, max_new_tokens=TOKENS))
            drawing = Drawing(prompt, known)
            episode = Episode(prompt, renderer, parser, drawing.draw, Limits(TURNS, 1 << 20, 3600.0))
            messages = [Message("user", f"look around {number}")]
            for turn in range(TURNS):
                answer = await episode.answer(messages)
                self.turns += 1
                self.before += answer.prompt_tokens
                self.cached += answer.drawn.cached
                told = f"{turn} says the tool " + "that a number was 345 " * (TOOL_WORDS // 5)
                messages += [answer.message, Message("tool", told, name="look")]
            number += self._episodes


async def updates(replica: Any, trainer: Player, first: int, seconds: list[float]) -> None:
    """Pull a version from the trainer's process every ``EVERY_S`` seconds; note what each took."""
    version = first
    while True:
        started_s = time.monotonic()
        await pull(replica, trainer, version)
        seconds.append(time.monotonic() - started_s)
        version += 1
        await asyncio.sleep(max(0.0, EVERY_S - (time.monotonic() - started_s)))


async def pull(replica: Any, trainer: Player, version: int) -> None:
    published = await asyncio.to_thread(trainer.call, "publish", version=version)
    await replica.pull(published, [published["address"]])


def say(text: str) -> None:
    print(f"{time.process_time():.0f} s of processor time: {text}", file=sys.stderr, flush=True)


async def measure(trainer: Player, options: Options, args: argparse.Namespace, url: str) -> dict[str, Any]:
    """Return the figures of ``args.rounds`` pairs of windows."""
    from benchmarks.weights.replica import Replica, generated_tokens, opened

    replica = Replica(await opened(options), options)
    say("engine opened")
    took: list[float] = []
    rates: dict[bool, list[float]] = {False: [], True: []}
    try:
        await pull(replica, trainer, 1)
        say("first version pulled")
        load = Load(replica.engine, args.episodes)
        async with load.playing(url):
            say("each episode had a turn")
            for window in range(2 * args.rounds):
                updated = window % 4 in (1, 2)  # without, with, with, without
                updating = asyncio.create_task(updates(replica, trainer, 2 + len(took), took)) if updated else None
                await asyncio.sleep(LEAD_S)
                tokens, began_s = generated_tokens(), time.monotonic()
                await asyncio.sleep(args.seconds)
                rates[updated].append((generated_tokens() - tokens) / (time.monotonic() - began_s))
                say(f"window {window + 1}, {'updates' if updated else 'none'}: {rates[updated][-1]:.0f} tokens/s")
                if updating is not None:
                    if updating.done():
                        updating.result()
                    updating.cancel()
                    await asyncio.gather(updating, return_exceptions=True)
    finally:
        await replica.close()
    ratios = [with_updates / without for with_updates, without in zip(rates[True], rates[False], strict=True)]
    return {
        "tokens_per_s": {"none": [*map(round, rates[False])], "updates": [*map(round, rates[True])]},
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "updates": len(took),
        "update_s_p50": round(statistics.median(took), 3),
        "turns": load.turns,
        "cached": round(load.cached / load.before, 3),
    }


def main() -> None:
    """Run and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a window")
    parser.add_argument("--rounds", type=int, default=4, help="pairs of windows")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    shape, surroundings = args.shape or ("0.5b" if on_gpu else "tiny"), environment(on_gpu, [0])
    os.environ |= surroundings
    from penstock.shared.bus import embedded

    with tempfile.TemporaryDirectory() as scratch, embedded.serving(Path(scratch) / "valkey") as url:
        folder = Path(scratch)
        configure(folder, SHAPES[shape])
        options = Options(
            folder=folder,
            device=args.device,
            dtype="bfloat16" if on_gpu else "float32",
            sequences=args.episodes,
            tensor_parallel_size=1,
            max_model_len=4096,
            gpu_memory_utilization=0.5,
            bucket_bytes=512 << 20,
            deadline_s=120.0,
            shadow="full",
        )
        trainer = Player(play, surroundings, "trainer", options)
        try:
            figures = asyncio.run(measure(trainer, options, args, url))
        finally:
            trainer.close()
    print(json.dumps({"device": args.device, "shape": shape, "episodes": args.episodes, **figures}))


if __name__ == "__main__":
    main()
