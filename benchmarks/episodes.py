"""What the episodes service costs a turn without generation: rendering, the tree, parsing.

    python -m benchmarks.episodes

Tool loops of eight turns by Qwen3's chat template, of which the last has 4,000 or 32,000 tokens before it; a policy that
answers at once. `turn_ms` is by the clock, of one episode at a time; `cpu_ms` of this process and the one that renders.
Memory is compared between 200 and 1,000 episodes. The last line is one JSON object.
"""

import asyncio
import gc
import json
import statistics
import time
from typing import Any

import numpy as np
import psutil

from penstock.services.episodes.answers import AnswerParser
from penstock.services.episodes.episode import Episode, Limits
from penstock.services.episodes.messages import Message
from penstock.services.episodes.renderer import Renderer
from penstock.shared.bus.messages import FinishReason, Int32Array, Sampling
from penstock.shared.peers.turns import DrawnTurn
from penstock.shared.reasoning import KNOWN
from tests.support import builders
from tests.support.chat_tokenizers import STOP, family

TURNS, EPISODES = 8, 20
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
]


class Policy:
    """Calls a tool at once."""

    def __init__(self) -> None:
        self.tokenizer = family("qwen3")
        text = '<think>\nthe tool says\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        self.ids = np.array([*ids, self.tokenizer.convert_tokens_to_ids(STOP["qwen3"])], dtype=np.int32)

    async def draw(self, token_ids: Int32Array, sampling: Sampling, number: int) -> DrawnTurn:
        spans = np.array([[0, number // 2]], dtype=np.int32)
        return DrawnTurn(self.ids, np.zeros(len(self.ids), dtype=np.float32), spans, FinishReason.STOP)


async def play(policy: Policy, renderer: Renderer, parser: AnswerParser, text: str) -> tuple[list[float], int]:
    """Return the seconds of each turn, and the tokens before the last."""
    episode = Episode(builders.prompt(), renderer, parser, policy.draw, Limits(TURNS, 1 << 20, 1e4))
    messages, seconds, tokens = [Message("user", f"look around {time.time_ns()}")], list[float](), 0
    for _ in range(TURNS):
        started_s = time.perf_counter()
        answer = await episode.answer(messages, TOOLS)
        seconds.append(time.perf_counter() - started_s)
        tokens = answer.prompt_tokens
        messages += [answer.message, Message("tool", text, name="look")]
    episode.sample(1.0)
    return seconds, tokens


def cpu_s() -> float:
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def measure(policy: Policy, renderer: Renderer, parser: AnswerParser, tokens: int) -> dict[str, float]:
    each = len(policy.tokenizer("the tool says that a number was 345 ", add_special_tokens=False)["input_ids"])
    text = "the tool says that a number was 345 " * (tokens // (TURNS - 1) // each)
    await play(policy, renderer, parser, text)
    before_s = cpu_s()
    plays = [await play(policy, renderer, parser, text) for _ in range(EPISODES)]
    used_s = cpu_s() - before_s
    seconds = sorted(second for played, _ in plays for second in played)
    return {
        "tokens": plays[0][1],
        "turn_ms_p50": round(1e3 * statistics.median(seconds), 2),
        "turn_ms_p95": round(1e3 * seconds[int(0.95 * len(seconds))], 2),
        "cpu_ms": round(1e3 * used_s / len(seconds), 2),
    }


async def memory(policy: Policy, renderer: Renderer, parser: AnswerParser) -> dict[str, float]:
    held = {}
    for count in (200, 800):
        for _ in range(count):
            await play(policy, renderer, parser, "the tool says " * 40)
        gc.collect()
        held[count] = psutil.Process().memory_info().rss
    return {
        "after_200_mib": held[200] >> 20,
        "after_1000_mib": held[800] >> 20,
        "ratio": round(held[800] / held[200], 3),
    }


async def main() -> None:
    policy = Policy()
    renderer = Renderer(policy.tokenizer)
    parser = AnswerParser(policy.tokenizer, KNOWN)
    measured = {f"{size}k": await measure(policy, renderer, parser, 1000 * size) for size in (4, 32)}
    print(json.dumps({"turns": measured, "memory": await memory(policy, renderer, parser)}))


if __name__ == "__main__":
    asyncio.run(main())
