"""Generated tokens that failing calls waste: 5 % of calls raise ConnectionError, as a lost sandbox does.

    python -m benchmarks.failing_calls

Real tool loops and processes of tools; answers of one length, each but the last with a call. ``stateless``: functions, whose
calls are made again; ``stateful``: an environment, whose episode is played again, five times at most. ``one``: at most one
call of an episode can fail, so 5 % of episodes do; ``each``: every call. ``wasted``: share of the generated tokens that are in
no sample. The last line is one JSON object.
"""

import asyncio
import collections
import json
import random
from typing import Any

import numpy as np

from penstock.services.episodes.answers import AnswerParser
from penstock.services.episodes.drivers.hosts import Hosts
from penstock.services.episodes.drivers.loop import ToolLoop
from penstock.services.episodes.episode import Episode, Limits
from penstock.services.episodes.renderer import Renderer
from penstock.shared.bus.messages import FinishReason, Int32Array, Prompt, Sampling
from penstock.shared.errors import TemporaryError
from penstock.shared.peers.turns import DrawnTurn
from penstock.shared.settings.rollout import EpisodesSettings
from tests.support import builders
from tests.support.chat_tokenizers import characters

SHARE, EPISODES, CALLS, ATTEMPTS, AT_A_TIME = 0.05, 1000, 4, 5, 32
SETTINGS = {
    "stateless": EpisodesSettings(tools=("benchmarks.failing_calls:look",), setup_s=600.0, tool_s=600.0),
    "stateful": EpisodesSettings(environment="benchmarks.failing_calls:Room", setup_s=600.0, tool_s=600.0),
}


def look(fails: bool) -> str:
    """Look.

    Args:
        fails: Whether it may fail.
    """
    if fails and random.random() < SHARE:
        raise ConnectionError("the sandbox was lost")
    return "nothing"


class Room:
    """A state that is lost with a failing call."""

    def reset(self) -> None:
        return None

    def look(self, fails: bool) -> str:
        """Look.

        Args:
            fails: Whether it may fail.
        """
        return look(fails)


class Policy:
    """Calls the tool ``CALLS`` times; ``single``: only one call, drawn by lot, may fail."""

    def __init__(self, *, single: bool) -> None:
        self._single = single
        self.drawn = 0

    def play(self, loop: ToolLoop, parts: tuple[Renderer, AnswerParser], prompt: Prompt) -> "Any":
        last = random.randrange(CALLS) if self._single else None

        async def draw(token_ids: Int32Array, sampling: Sampling, number: int) -> DrawnTurn:
            call = {"name": "look", "arguments": {"fails": last is None or number - 1 == last}}
            text = f"<tool_call>{json.dumps(call)}</tool_call>" if number <= CALLS else "done".ljust(70)
            ids = np.array([*map(ord, text), 0], dtype=np.int32)
            self.drawn += len(ids)
            spans = np.array([[0, 0]], dtype=np.int32)
            return DrawnTurn(ids, np.zeros(len(ids), dtype=np.float32), spans, FinishReason.STOP)

        episode = Episode(prompt, *parts, draw, Limits(CALLS + 1, 1 << 20, 1e4))
        return episode, loop.play(episode)


async def measure(kind: str, *, single: bool) -> dict[str, Any]:
    hosts, tokenizer, policy = Hosts(SETTINGS[kind]), characters(), Policy(single=single)
    await hosts.open()
    loop, parts = ToolLoop(SETTINGS[kind], hosts, "answer"), (Renderer(tokenizer), AnswerParser(tokenizer, {}))
    places, counts = asyncio.Semaphore(AT_A_TIME), collections.Counter[str]()

    async def play(number: int) -> None:
        async with places:
            for _ in range(ATTEMPTS):
                counts["attempts"] += 1
                episode, playing = policy.play(loop, parts, builders.prompt(number))
                try:
                    await playing
                except TemporaryError:
                    continue
                sample = episode.sample(None)
                counts["kept"] += int(sample.sampled.sum())
                return
            counts["lost"] += 1

    await asyncio.gather(*(play(number) for number in range(EPISODES)))
    await hosts.close()
    return {
        "wasted": round(1 - counts["kept"] / policy.drawn, 4),
        "attempts": counts["attempts"],
        "lost": counts["lost"],
    }


async def main() -> None:
    cases = [("stateless", False), ("stateful", True), ("stateful", False)]
    result = {f"{kind}, {'one' if single else 'each'}": await measure(kind, single=single) for kind, single in cases}
    print(json.dumps({"share": SHARE, "calls": CALLS, "episodes": EPISODES, **result}))


if __name__ == "__main__":
    asyncio.run(main())
