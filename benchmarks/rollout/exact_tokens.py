"""Whether every sampled token of episodes is handed over as the engine drew it, whatever clients send back.

    python -m benchmarks.rollout.exact_tokens --tokens 1000000
    python -m benchmarks.rollout.exact_tokens --tokens 100000 --engine vllm

Chat templates of eight families × seven kinds of history, over the gateway's HTTP in three dialects in turn, and a replica's
listener for turns. The engine is scripted: texts in tokens unlike those of their encoding, with random logprobs, versions that
change within a turn, and supports. Or it is a real one, whose weights are updated meanwhile; then the trainer's logprobs of
the same tokens are compared, too (:mod:`benchmarks.rollout.tapped_engines`). What is compared is each sampled token of the group as its reader decodes it: what it
saw, id, logprob, version, support. The last line is one JSON object.
"""

import argparse
import asyncio
import collections
import dataclasses
import json
import math
import random
import sys
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
from penstock.shared.bus.messages import FinishReason, PolicyVersion, Purpose, RolloutGroup, Sample, Sampling
from penstock.shared.process.telemetry import Presence, Status
from penstock.shared.reasoning import KNOWN
from penstock.shared.settings import Settings
from tests.support import builders, replicas
from tests.support.chat_tokenizers import STOP, family

KINDS = ("verbatim", "re-serialised", "reasoning dropped", "compacted", "sub-agent", "retried", "best-of-n")
TURNS, WORDS = 10, ("the", "tool", "says", "that", "a", "number", "was", "not", "is,", "345", "22")
Draw = tuple[Any, ...]
"""What was seen, ids, logprobs, versions, and supports of a turn."""


class ScriptedEngine:
    """Draws at random for ``name``'s template, and remembers each draw."""

    version = PolicyVersion(3)

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.tokenizer, self.lot = name, family(name), random.Random(seed)
        self.stop = self.tokenizer.convert_tokens_to_ids(STOP[name])
        self.thinks = "<think>" in self.tokenizer.get_vocab()
        self.draws = collections.Counter[Draw]()
        """Those that no group has handed over yet."""
        self.turns = self.other_tokens = 0

    def sampling(self, given: Sampling, number: int) -> Sampling:
        return dataclasses.replace(given, max_new_tokens=4096)

    def note(self, sample: Sample) -> None:
        """Its logprobs are of no model."""

    def text_ids(self) -> list[int]:
        """Return the tokens of an answer, which its text alone would encode otherwise."""
        text = " ".join(self.lot.choices(WORDS, k=self.lot.randrange(40, 120)))
        if self.lot.random() < 0.6:
            text += f' <tool_call>\n{{"name": "add", "arguments": {{"a":  {self.lot.randrange(99)}, "b": "x"}}}}\n</tool_call>'
        if self.thinks:
            text = f"<think>\n{' '.join(self.lot.choices(WORDS, k=20))}\n</think>\n\n{text}"
        cuts = sorted(self.lot.sample(range(1, len(text)), 12))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return [token for piece in pieces for token in self._encode(piece)]

    async def draw(self, request: GenerationRequest, least: PolicyVersion, purpose: Purpose) -> GeneratedGroup:
        ids = self.text_ids()
        self.turns += 1
        self.other_tokens += ids != self._encode(self.tokenizer.decode(ids))
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
        self.draws[drawn(saw, token_ids, logprobs, versions, sizes, supports)] += 1
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


async def play(client: Client, kind: str, lot: random.Random) -> int:
    """Converse for :data:`TURNS` turns; every second history is of ``kind``, the others are verbatim. Return how many answers
    called a tool.
    """
    called = 0
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
        results = client.results(said)
        called += bool(results)
        client.items += [*client.changed(said, now), *(results or [client.user("go on <|eot_id|>")])]
    return called


# ---------------------------------------------------------------- comparison


def handed_over(sample: Sample) -> list[Draw]:
    """Return what each sampled segment of a sample is, as its reader has it."""
    segments, ids = sample.segments, sample.token_ids
    ends = [*segments[1:, 0].tolist(), len(ids)]
    sizes = sample.support_sizes if len(sample.support_sizes) else np.zeros(len(ids), np.int32)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
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
    calls: int = 0
    """Answers that called a tool."""


async def measure(url: str, engine: Any, tokens: int, ends_s: float) -> dict[str, Measured]:
    """Play episodes of each kind with one family's template until ``tokens`` were sampled in each, or the time is over."""
    settings = Settings.model_validate({"episodes": {"agent": "a:run"}, "run": {"host": "127.0.0.1"}})
    status = Status()
    bus = await Bus.connect(url, engine.name, wait_s=60.0)
    context = replicas.context(settings, bus, "rollout-0", status)
    await context.secret.refresh()
    status.version, status.state = engine.version, "working"
    listener = TurnListener(context, engine, CharacterCodec(), engine.draw)
    known = Replicas(bus, context.secret)
    gateway = Gateway("127.0.0.1:0", context.secret, "policy", 1 << 20)
    renderer = Renderer(engine.tokenizer)
    parser = AnswerParser(engine.tokenizer, KNOWN if renderer.writes_reasoning else {})
    beats = Presence(bus, "rollout", "rollout-0", 0.5, status)
    running = [
        asyncio.create_task(each) for each in (listener.run(), known.run(), gateway.run(), beats.run(asyncio.Event()))
    ]
    measured = {kind: Measured() for kind in KINDS}

    async def play_kind(kind: str, row: Measured) -> None:
        while row.tokens < tokens and time.monotonic() < ends_s:
            await _episode(row, kind, engine, known, gateway, renderer, parser)
            print(engine.name, kind, row.tokens, row.wrong, file=sys.stderr)

    try:
        await asyncio.gather(*(play_kind(kind, row) for kind, row in measured.items()))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await bus.close()
    rest = sum(count * len(draw[1]) // 4 for draw, count in engine.draws.items() if count > 0)
    return {**measured, "not handed over": Measured(wrong=rest)}


async def _episode(
    row: Measured,
    kind: str,
    engine: Any,
    known: Replicas,
    gateway: Gateway,
    renderer: Renderer,
    parser: AnswerParser,
) -> None:
    made = builders.prompt(row.episodes)
    prompt = dataclasses.replace(made, sampling=engine.sampling(made.sampling, row.episodes))
    limits = Limits(
        turns=200, context_tokens=8000 if prompt.sampling.max_new_tokens < 4096 else 1 << 20, deadline_s=3600.0
    )
    episode = Episode(prompt, renderer, parser, Drawing(prompt, known).draw, limits)
    dialect = (Client, Messages, Items)[row.episodes % 3]
    with gateway.visited(episode) as key:
        async with httpx.AsyncClient(
            base_url=gateway.url, headers={"authorization": f"Bearer {key}"}, timeout=600.0, trust_env=False
        ) as http:
            row.calls += await play(dialect(http), kind, engine.lot)
    whole = RolloutGroup(prompt, np.zeros(0, np.int32), (episode.sample(1.0),), "episodes-0", 0.0, 1.0)
    (sample,) = wire.decode(wire.encode(whole), RolloutGroup).samples
    await asyncio.to_thread(engine.note, sample)
    row.tokens += int(sample.sampled.sum())
    row.episodes += 1
    for draw in handed_over(sample):
        row.turns += 1
        row.wrong += 0 if engine.draws[draw] else len(draw[1]) // 4
        engine.draws[draw] -= 1


async def main(url: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the totals, and of each family and kind how many tokens differ."""
    families, kind = options.families, options.engine
    if kind == "scripted":
        return await _total(url, options, [ScriptedEngine(name, seed) for seed, name in enumerate(families)])
    from benchmarks.rollout.tapped_engines import CHANGE, TappedEngine, opened

    async with opened(kind, families, folder, options.policy, options.update_s) as versions:
        total = await _total(url, options, [TappedEngine(name, seed, versions) for seed, name in enumerate(families)])
    mismatches = {
        name: {"tokens": each.tokens, "kl": each.kl, "most_nats": each.most}
        for name, each in versions.mismatches.items()
        if each.tokens
    }
    return {"engine": kind, "updates": versions.swaps, "change": CHANGE, **total, "mismatch": mismatches}


async def _total(url: str, options: argparse.Namespace, engines: Sequence[Any]) -> dict[str, Any]:
    each = -(-options.tokens // (len(engines) * len(KINDS)))
    ends_s = time.monotonic() + options.seconds
    tables = await asyncio.gather(*(measure(url, engine, each, ends_s) for engine in engines))
    measured = {engine.name: kinds for engine, kinds in zip(engines, tables, strict=True)}
    rows = [row for kinds in measured.values() for row in kinds.values()]
    names = ("tokens", "wrong", "episodes", "turns", "calls")
    total = {name: sum(getattr(row, name) for row in rows) for name in names}
    other = sum(engine.other_tokens for engine in engines) / total["turns"]
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
    options.add_argument("--engine", choices=("scripted", "transformers", "vllm"), default="scripted")
    options.add_argument(
        "--update-s", type=float, default=2.0, help="seconds between versions of a real engine; 0: none"
    )
    options.add_argument("--seconds", type=float, default=math.inf, help="after which no episode begins")
    options.add_argument("--policy", type=Path, help="where a real engine's taught policy is, or is written")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, embedded.serving(Path(folder) / "valkey") as url:
        print(json.dumps(asyncio.run(main(url, arguments, Path(folder)))))
