"""Whether every sampled token of episodes is handed over as the engine drew it, whatever clients send back.

    python -m benchmarks.rollout.exact_tokens --tokens 1000000

Chat templates of eight families × seven kinds of history, over the gateway's HTTP in three dialects in turn, and a replica's
listener for turns. The engine is scripted: texts in tokens unlike those of their encoding, with random logprobs, versions that
change within a turn, and supports. What is compared is each sampled token of the group as its reader decodes it: what it
saw, id, logprob, version, support. The last line is one JSON object.
"""

import argparse
import asyncio
import collections
import dataclasses
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np

from penstock.services.episodes.answers import AnswerParser
from penstock.services.episodes.episode import Episode, Limits
from penstock.services.episodes.http.gateway import Gateway
from penstock.services.episodes.renderer import Renderer
from penstock.services.episodes.replicas import Replicas
from penstock.services.episodes.service import Drawing
from penstock.services.rollout.engines.engine import GeneratedGroup, GeneratedSample, GenerationRequest
from penstock.services.rollout.engines.prompts import CharacterCodec
from penstock.services.rollout.episode_turns import TurnListener
from penstock.shared.bus import embedded
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import FinishReason, PolicyVersion, Purpose, RolloutGroup, Sample
from penstock.shared.process.telemetry import Presence, Status
from penstock.shared.reasoning import KNOWN
from penstock.shared.settings import Settings
from tests.support import builders, replicas
from tests.support.chat_tokenizers import STOP, family

KINDS = ("verbatim", "re-serialised", "reasoning dropped", "compacted", "sub-agent", "retried", "best-of-n")
TURNS, WORDS = 10, ("the", "tool", "says", "that", "a", "number", "was", "not", "is,", "345", "22")
Draw = tuple[Any, ...]
"""What was seen, ids, logprobs, versions, and supports of a turn."""


class Engine:
    """Draws at random for ``name``'s template, and remembers each draw of the episode."""

    version = PolicyVersion(3)

    def __init__(self, name: str, seed: int) -> None:
        self.tokenizer, self.lot = family(name), random.Random(seed)
        self.stop = self.tokenizer.convert_tokens_to_ids(STOP[name])
        self.thinks = "<think>" in self.tokenizer.get_vocab()
        self.draws: list[Draw] = []
        self.turns = self.other_tokens = 0

    async def draw(self, request: GenerationRequest, least: PolicyVersion, purpose: Purpose) -> GeneratedGroup:
        text = " ".join(self.lot.choices(WORDS, k=self.lot.randrange(40, 120)))
        if self.lot.random() < 0.6:
            text += f' <tool_call>\n{{"name": "add", "arguments": {{"a":  {self.lot.randrange(99)}, "b": "x"}}}}\n</tool_call>'
        if self.thinks:
            text = f"<think>\n{' '.join(self.lot.choices(WORDS, k=20))}\n</think>\n\n{text}"
        cuts = sorted(self.lot.sample(range(1, len(text)), 12))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        ids = [token for piece in pieces for token in self._encode(piece)]
        self.turns += 1
        self.other_tokens += ids != self._encode(text)
        token_ids = np.array([*ids, *([self.stop] if self.lot.random() < 0.9 else [])], dtype=np.int32)
        count, lot = len(token_ids), np.random.default_rng(self.lot.randrange(1 << 30))
        logprobs = -lot.exponential(1.0, count).astype(np.float32)
        changed = int(lot.integers(1, count))
        spans = np.array([[0, 3 + self.turns // 4], [changed, 4 + self.turns // 4]], dtype=np.int32)
        rows = [sorted({int(token), *map(int, lot.integers(0, 200, lot.integers(0, 4)))}) for token in token_ids]
        sizes = np.array([len(row) for row in rows], dtype=np.int32)
        supports = np.array([each for row in rows for each in row], dtype=np.int32)
        versions = np.where(np.arange(count) < changed, spans[0, 1], spans[1, 1])
        saw = request.prompt_token_ids
        self.draws.append(drawn(saw, token_ids, logprobs, versions, sizes, supports))
        sample = GeneratedSample(token_ids, logprobs, spans, FinishReason.STOP, sizes, supports)
        return GeneratedGroup((sample,), time.time(), time.time())

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def drawn(*columns: Any) -> Draw:
    return tuple(np.asarray(column).tobytes() for column in columns[:2]) + tuple(
        np.asarray(column).astype(np.float32 if place == 0 else np.int64).tobytes()
        for place, column in enumerate(columns[2:])
    )


# ---------------------------------------------------------------- clients


class Client:
    """A conversation in a dialect's own items, over HTTP."""

    path, field = "/v1/chat/completions", "messages"
    extra: ClassVar[Any] = {}
    tools: ClassVar[Any] = [
        {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
    ]

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.items: list[Any] = [self.user("what is 1 and 2?")]

    async def ask(self, items: Sequence[Any], retries: int = 0, **more: Any) -> Any:
        body = {"model": "any", "tools": self.tools, self.field: list(items), **self.extra, **more}
        answer = await self.http.post(self.path, json=body, headers={"x-stainless-retry-count": str(retries)})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def user(self, text: str) -> Any:
        return {"role": "user", "content": text}

    def said(self, answer: Any, choice: int = 0) -> list[Any]:
        return [answer["choices"][choice]["message"]]

    def results(self, said: Sequence[Any]) -> list[Any]:
        calls = said[0].get("tool_calls") or ()
        return [{"role": "tool", "tool_call_id": each["id"], "content": "3 <|im_end|>"} for each in calls]

    def changed(self, said: Sequence[Any], kind: str) -> list[Any]:
        """Return an answer as a client of ``kind`` sends it back."""
        (message,) = json.loads(json.dumps(said))
        if kind == "reasoning dropped":
            message.pop("reasoning_content", None)
        if kind == "re-serialised":
            for each in message.get("tool_calls") or ():
                each["function"]["arguments"] = json.dumps(json.loads(each["function"]["arguments"]), indent=2)
        return [message]


class Messages(Client):
    path = "/v1/messages"
    extra: ClassVar[Any] = {"max_tokens": 4096}
    tools: ClassVar[Any] = [{"name": "add", "description": "Add.", "input_schema": {"type": "object"}}]

    def said(self, answer: Any, choice: int = 0) -> list[Any]:
        return [{"role": "assistant", "content": answer["content"]}]

    def results(self, said: Sequence[Any]) -> list[Any]:
        calls = [block for block in said[0]["content"] if block["type"] == "tool_use"]
        told = [{"type": "tool_result", "tool_use_id": each["id"], "content": "3 <|im_end|>"} for each in calls]
        return [{"role": "user", "content": told}] if told else []

    def changed(self, said: Sequence[Any], kind: str) -> list[Any]:
        blocks = [each for each in said[0]["content"] if kind != "reasoning dropped" or each["type"] != "thinking"]
        return [{"role": "assistant", "content": blocks}]


class Items(Client):
    path, field = "/v1/responses", "input"
    tools: ClassVar[Any] = [
        {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}}
    ]

    def said(self, answer: Any, choice: int = 0) -> list[Any]:
        return list(answer["output"])

    def results(self, said: Sequence[Any]) -> list[Any]:
        calls = [each for each in said if each["type"] == "function_call"]
        return [
            {"type": "function_call_output", "call_id": each["call_id"], "output": "3 <|im_end|>"} for each in calls
        ]

    def changed(self, said: Sequence[Any], kind: str) -> list[Any]:
        items = [dict(each) for each in said if kind != "reasoning dropped" or each["type"] != "reasoning"]
        for each in items:
            if kind == "re-serialised" and each["type"] == "function_call":
                each["arguments"] = json.dumps(json.loads(each["arguments"]), indent=2)
        return items


async def play(client: Client, kind: str, lot: random.Random) -> None:
    """Converse for :data:`TURNS` turns; every second history is of ``kind``, the others are verbatim."""
    for turn in range(TURNS):
        now = kind if turn % 2 else "verbatim"
        said = client.said(await client.ask(client.items))
        if now == "retried":
            await client.ask(client.items, retries=1)  # draws nothing
        if now == "best-of-n":
            others = await asyncio.gather(*(client.ask(client.items) for _ in range(2)))
            said = lot.choice([said, *map(client.said, others)])
        if now == "sub-agent":
            await client.ask([client.user(f"help another: what is {turn}?")])
        if now == "compacted":
            client.items = [client.user(f"so far: {json.dumps(said)[:300]}"), client.user("what now?")]
            continue
        client.items += [*client.changed(said, now), *(client.results(said) or [client.user("go on <|eot_id|>")])]


# ---------------------------------------------------------------- comparison


def handed_over(sample: Sample) -> list[Draw]:
    """Return what each sampled segment of a sample is, as its reader has it."""
    segments, ids = sample.segments, sample.token_ids
    ends = [*segments[1:, 0].tolist(), len(ids)]
    offsets = np.concatenate([[0], np.cumsum(sample.support_sizes)])
    paths: list[Any] = []
    draws = []
    for (start, parent, is_sampled), end in zip(segments.tolist(), ends, strict=True):
        before = paths[parent] if parent >= 0 else ids[:0]
        paths.append(np.concatenate([before, ids[start:end]]))
        if is_sampled:
            part = slice(start, end)
            supports = sample.support_ids[offsets[start] : offsets[end]]
            columns = sample.behavior_logprobs[part], sample.token_versions[part], sample.support_sizes[part], supports
            draws.append(drawn(before, ids[part], *columns))
    return draws


@dataclasses.dataclass
class Measured:
    tokens: int = 0
    wrong: int = 0
    episodes: int = 0
    turns: int = 0
    other_tokens: int = 0


async def measure(url: str, name: str, tokens: int, seed: int) -> dict[str, Measured]:
    """Play episodes of each kind with one family's template until ``tokens`` were sampled in each."""
    settings = Settings.model_validate({"episodes": {"agent": "a:run"}, "run": {"host": "127.0.0.1"}})
    engine, status = Engine(name, seed), Status()
    bus = await Bus.connect(url, name, wait_s=10.0)
    context = replicas.context(settings, bus, "rollout-0", status)
    await context.secret.refresh()
    status.version, status.state = engine.version, "working"
    listener = TurnListener(context, engine, CharacterCodec(), engine.draw)  # type: ignore[arg-type]
    known = Replicas(bus, context.secret)
    gateway = Gateway("127.0.0.1:0", context.secret, "policy", 1 << 20)
    renderer = Renderer(engine.tokenizer)
    parser = AnswerParser(engine.tokenizer, KNOWN if renderer.writes_reasoning else {})
    beats = Presence(bus, "rollout", "rollout-0", 0.2, status)
    running = [
        asyncio.create_task(each) for each in (listener.run(), known.run(), gateway.run(), beats.run(asyncio.Event()))
    ]
    measured = {kind: Measured() for kind in KINDS}
    try:
        for kind, row in measured.items():
            while row.tokens < tokens:
                await _episode(row, kind, engine, known, gateway, renderer, parser)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await bus.close()
    return measured


async def _episode(
    row: Measured,
    kind: str,
    engine: Engine,
    known: Replicas,
    gateway: Gateway,
    renderer: Renderer,
    parser: AnswerParser,
) -> None:
    made = builders.prompt(row.episodes)
    prompt = dataclasses.replace(made, sampling=dataclasses.replace(made.sampling, max_new_tokens=4096))
    engine.draws, turns, other_tokens = [], engine.turns, engine.other_tokens
    limits = Limits(turns=200, context_tokens=1 << 20, deadline_s=3600.0)
    episode = Episode(prompt, renderer, parser, Drawing(prompt, known).draw, limits)
    dialect = (Client, Messages, Items)[row.episodes % 3]
    with gateway.visited(episode) as key:
        async with httpx.AsyncClient(
            base_url=gateway.url, headers={"authorization": f"Bearer {key}"}, timeout=600.0, trust_env=False
        ) as http:
            await play(dialect(http), kind, engine.lot)
    whole = RolloutGroup(prompt, np.zeros(0, np.int32), (episode.sample(1.0),), "episodes-0", 0.0, 1.0)
    (sample,) = wire.decode(wire.encode(whole), RolloutGroup).samples
    differing = collections.Counter(engine.draws)
    differing.subtract(handed_over(sample))
    row.tokens += int(sample.sampled.sum())
    row.wrong += sum(abs(count) * len(draw[1]) // 4 for draw, count in differing.items())
    row.episodes += 1
    row.turns += engine.turns - turns
    row.other_tokens += engine.other_tokens - other_tokens


async def main(url: str, tokens: int, families: Sequence[str]) -> dict[str, Any]:
    """Return the totals, and of each family and kind how many tokens differ."""
    each = -(-tokens // (len(families) * len(KINDS)))
    tables = await asyncio.gather(*(measure(url, name, each, seed) for seed, name in enumerate(families)))
    measured = dict(zip(families, tables, strict=True))
    rows = [row for kinds in measured.values() for row in kinds.values()]
    total = {name: sum(getattr(row, name) for row in rows) for name in ("tokens", "wrong", "episodes", "turns")}
    other = sum(row.other_tokens for row in rows) / total["turns"]
    return {
        **total,
        "texts_that_encode_otherwise": round(other, 3),
        "wrong_by_family_and_kind": {
            name: {k: row.wrong for k, row in kinds.items()} for name, kinds in measured.items()
        },
    }


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tokens", type=int, default=1_000_000)
    options.add_argument("--families", nargs="*", default=sorted(STOP))
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, embedded.serving(Path(folder) / "valkey") as url:
        print(json.dumps(asyncio.run(main(url, arguments.tokens, arguments.families))))
