"""What the episodes service costs a turn without generation: rendering, the tree, parsing.

    python -m benchmarks.episodes

Tool loops of eight turns by Qwen3's chat template, of which the last has 4,000 or 32,000 tokens before it. `alone`: one
episode at a time, drawn at once. `gateway`: 256 agents of another process ask over HTTP, and a turn is drawn for 5 to 15 s,
about 25 turns a second; of the last turns, the time by the clock from the request's head to its answer without the draw.
`cpu_ms` of this process and the one that renders, of all turns. Memory is compared between 1,000 and 10,000 episodes. The
last line is one JSON object.
"""

import asyncio
import contextlib
import gc
import json
import random
import statistics
import sys
import time
from typing import Any

import httpx
import numpy as np
import psutil
from fastapi import Request
from fastapi.responses import Response

from penstock.services.episodes.answers import AnswerParser
from penstock.services.episodes.episode import Draw, Episode, Limits
from penstock.services.episodes.http.gateway import Gateway
from penstock.services.episodes.messages import Message
from penstock.services.episodes.renderer import Renderer
from penstock.shared.bus.messages import FinishReason, Int32Array, Prompt, Sampling
from penstock.shared.peers.turns import DrawnTurn
from penstock.shared.reasoning import KNOWN
from tests.support import builders
from tests.support.chat_tokenizers import STOP, family

TURNS, EPISODES, AGENTS = 8, 20, 256
DRAW_S = 10.0
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


async def play(
    policy: Policy, renderer: Renderer, parser: AnswerParser, text: str, turns: int = TURNS
) -> tuple[list[float], int]:
    """Return the seconds of each turn, and the tokens before the last."""
    episode = Episode(builders.prompt(), renderer, parser, policy.draw, Limits(TURNS, 1 << 20, 1e4))
    messages, seconds, tokens = [Message("user", f"look around {time.time_ns()}")], list[float](), 0
    for _ in range(turns):
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


async def measure(policy: Policy, renderer: Renderer, parser: AnswerParser, tokens: int) -> dict[str, Any]:
    each = len(policy.tokenizer("the tool says that a number was 345 ", add_special_tokens=False)["input_ids"])
    text = "the tool says that a number was 345 " * (tokens // (TURNS - 1) // each)
    await play(policy, renderer, parser, text)
    before_s = cpu_s()
    plays = [await play(policy, renderer, parser, text) for _ in range(EPISODES)]
    used_s = cpu_s() - before_s
    seconds = sorted(second for played, _ in plays for second in played)
    alone = {
        "turn_ms_p50": round(1e3 * statistics.median(seconds), 2),
        "turn_ms_p95": round(1e3 * seconds[int(0.95 * len(seconds))], 2),
        "cpu_ms": round(1e3 * used_s / len(seconds), 2),
    }
    return {"tokens": plays[0][1], "alone": alone, "gateway": await serve(policy, renderer, parser, text)}


class TimedGateway(Gateway):
    """Notes the seconds of each request, without its draw, by episode."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:0", lambda: b"secret", "policy", 1 << 20)
        self.seconds: dict[int, list[float]] = {}
        self.drawn: dict[int, float] = {}

    async def _answered(self, request: Request) -> Response:
        started_s, visitor = time.perf_counter(), self._visitor(request)
        answer = await super()._answered(request)
        assert visitor is not None
        assert answer.status_code == 200, bytes(answer.body)[:500]
        name = id(visitor.episode.prompt)
        self.seconds.setdefault(name, []).append(time.perf_counter() - started_s - self.drawn[name])
        return answer

    def draw_of(self, prompt: Prompt, policy: Policy) -> Draw:
        async def draw(token_ids: Int32Array, sampling: Sampling, number: int) -> DrawnTurn:
            started_s = time.perf_counter()
            await asyncio.sleep(DRAW_S * random.uniform(0.5, 1.5))
            drawn = await policy.draw(token_ids, sampling, number)
            self.drawn[id(prompt)] = time.perf_counter() - started_s
            return drawn

        return draw


async def agents(given: dict[str, Any]) -> None:
    """Ask as agents do, by plain HTTP: the client's process."""
    limits = httpx.Limits(max_connections=len(given["keys"]))
    async with httpx.AsyncClient(base_url=given["url"], timeout=600.0, trust_env=False, limits=limits) as client:

        async def play(number: int, key: str) -> None:
            await asyncio.sleep(DRAW_S * number / len(given["keys"]))
            messages: list[Any] = [{"role": "user", "content": f"look around {number}"}]
            for _ in range(TURNS):
                body = {"messages": messages, "tools": TOOLS}
                answer = await client.post("/v1/chat/completions", json=body, headers={"x-api-key": key})
                said = answer.raise_for_status().json()["choices"][0]["message"]
                call = said["tool_calls"][0]["id"]
                messages += [said, {"role": "tool", "tool_call_id": call, "content": given["text"]}]

        await asyncio.gather(*(play(number, key) for number, key in enumerate(given["keys"])))


async def serve(policy: Policy, renderer: Renderer, parser: AnswerParser, text: str) -> dict[str, float]:
    gateway = TimedGateway()
    serving = asyncio.create_task(gateway.run())
    with contextlib.ExitStack() as visits:
        prompts = [builders.prompt(number) for number in range(AGENTS)]
        limits = Limits(TURNS, 1 << 20, 1e4)
        episodes = [Episode(each, renderer, parser, gateway.draw_of(each, policy), limits) for each in prompts]
        keys = [visits.enter_context(gateway.visited(episode)) for episode in episodes]
        before_s, started_s = cpu_s(), time.perf_counter()
        command = (sys.executable, "-m", "benchmarks.episodes", "--agents")
        client = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
        await client.communicate(json.dumps({"url": gateway.url, "keys": keys, "text": text}).encode())
        used_s, took_s = cpu_s() - before_s, time.perf_counter() - started_s
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert client.returncode == 0
    last = sorted(seconds[-1] for seconds in gateway.seconds.values())
    assert len(last) == AGENTS
    return {
        "turns_per_s": round(AGENTS * TURNS / took_s, 1),
        "turn_ms_p50": round(1e3 * statistics.median(last), 2),
        "turn_ms_p95": round(1e3 * last[int(0.95 * len(last))], 2),
        "cpu_ms": round(1e3 * used_s / (AGENTS * TURNS), 2),
    }


async def memory(policy: Policy, renderer: Renderer, parser: AnswerParser) -> dict[str, float]:
    held = {}
    for count in (1000, 9000):
        for _ in range(count):
            await play(policy, renderer, parser, "the tool says", 3)
        gc.collect()
        held[count] = psutil.Process().memory_info().rss
    return {
        "after_1000_mib": held[1000] >> 20,
        "after_10000_mib": held[9000] >> 20,
        "ratio": round(held[9000] / held[1000], 3),
    }


async def main() -> None:
    policy = Policy()
    renderer = Renderer(policy.tokenizer)
    parser = AnswerParser(policy.tokenizer, KNOWN)
    measured = {f"{size}k": await measure(policy, renderer, parser, 1000 * size) for size in (4, 32)}
    print(json.dumps({"turns": measured, "memory": await memory(policy, renderer, parser)}))


if __name__ == "__main__":
    asyncio.run(agents(json.load(sys.stdin)) if "--agents" in sys.argv else main())
