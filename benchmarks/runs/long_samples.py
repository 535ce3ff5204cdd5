r"""Samples of 131,072 tokens, stage by stage on a CPU, with a tiny policy; each stage also at half the length.

    python -m benchmarks.runs.long_samples --out benchmarks/results/DATE-long-samples-cpu.json
    python -m benchmarks.runs.long_samples --only score page

Of each stage, for a group of ``--samples`` samples (``decode`` and ``train``: of one):

    cpu_s        processor time of the process, all threads
    loop_ms      longest time for which a callback held the event loop, in processor time (stages on one)
    growth       cpu_s over that at half the length: 2 is linear, 4 quadratic
    bytes        what the stage writes or sends; of ``layout`` its masks

``decode`` reads a prompt of that length and draws 32 tokens (``token_ms`` of one of these); attention makes ``train`` and the
prompt quadratic. Completions of ``score`` are of four characters a token, by family: prose, a formula, tags, digits, braces.
"""

import argparse
import asyncio
import dataclasses
import functools
import gc
import json
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from prometheus_client import REGISTRY
from transformers import DynamicCache

from benchmarks.bus.wire import make_experience, make_group
from penstock.services.coordinator.api.app import make_app
from penstock.services.coordinator.records.recorder import journal_line
from penstock.services.coordinator.records.report import write_report
from penstock.services.reward.service import make_scorer
from penstock.services.rollout.engines.engine import GenerationRequest
from penstock.services.rollout.engines.transformers.cache import make_room
from penstock.services.rollout.engines.transformers.decoding import Batch, Tokens
from penstock.services.trainer.batch.assignment import plan
from penstock.services.trainer.batch.packing import PackedRow
from penstock.services.trainer.batch.staleness import find_contexts
from penstock.services.trainer.model.layers.attention_layout import rectangles
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.token_values import TokenRecorder
from penstock.shared.bus import embedded, streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, PolicyVersion, RolloutGroup, Sampling
from penstock.shared.model.tokenizer import Limits, TokenizerCodec
from penstock.shared.process.event_loop import watched
from penstock.shared.settings import Settings
from tests.support import tiny
from tests.support.coordinator_players import make
from tests.support.coordinator_players import settings as run_settings

Figures = dict[str, float]
FAMILIES = {
    "prose": "abc ",
    "formula": r"\frac{1}{2}+",
    "tags": "<think>a</think>",
    "digits": "1234",
    "braces": "\\boxed{{",
}
SCORERS: Sequence[dict[str, Any]] = (
    {"kind": "answer"},
    {"kind": "answer", "mode": "numeric", "extract": "last_number", "name": "number"},
    {"kind": "answer", "extract": "choice", "name": "choice"},
    {"kind": "answer", "preset": "math-verify", "name": "library"},
    {"kind": "format", "tags": ["think?"], "pattern": "(<think>.*?</think>)?.*", "scripts": ["Latin"]},
    {"kind": "format", "json_schema": {"type": "object"}, "name": "json"},
    {"kind": "python", "function": "tests.support.scorer_functions:score"},
)  # fmt: skip
DRAWN = 32


async def timed(work: Callable[[], Awaitable[Any]]) -> Figures:
    """Return what a coroutine costs, and for how long it held the event loop."""
    gc.collect()
    async with watched():
        await asyncio.sleep(0.03)
        started_s = time.process_time()
        await work()
        cpu_s = time.process_time() - started_s
        await asyncio.sleep(0.05)
    held_s = REGISTRY.get_sample_value("penstock_event_loop_longest_stall_seconds", {"clock": "cpu"}) or 0.0
    return {"cpu_s": cpu_s, "loop_ms": 1000 * held_s}


def spent(work: Callable[[], Any]) -> Figures:
    started_s = time.process_time()
    work()
    return {"cpu_s": time.process_time() - started_s}


def policy(tokens: int) -> Any:
    """Return a Llama of one layer with one head of 16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 16,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=tiny.VOCABULARY, max_position_embeddings=2 * tokens, tie_word_embeddings=True))  # fmt: skip


def group_of(samples: int, tokens: int, text: str = "abc ") -> RolloutGroup:
    """Return a group with ids of the tiny vocabulary and four characters a token."""
    group, texts = make_group(samples, tokens), (text * (4 * tokens // len(text) + 1))[: 4 * tokens]
    made = [dataclasses.replace(each, token_ids=each.token_ids % 40 + 2, text=texts) for each in group.samples]
    return dataclasses.replace(group, samples=tuple(made), prompt_token_ids=group.prompt_token_ids[:10] % 40 + 2)


def decode(tokens: int, samples: int, folder: Path) -> dict[str, Figures]:
    model = policy(tokens).eval()
    prompt, times = np.arange(tokens, dtype=np.int32) % 40 + 2, list[float]()
    with torch.inference_mode():
        request = GenerationRequest(prompt, Sampling(1, DRAWN, 1.0, min_new_tokens=DRAWN), 1)
        batch = Batch(model, [request], Tokens((1,)), torch.device("cpu"))
        while not batch.finished:
            started_s = time.process_time()
            batch.step(PolicyVersion(0))
            times.append(time.process_time() - started_s)
    rest = sorted(times[2:])  # the second one makes room
    return {"prompt": {"cpu_s": times[0]}, "tokens": {"cpu_s": sum(rest), "token_ms": 1000 * rest[len(rest) // 2]}}


@torch.inference_mode()
def cache(tokens: int, samples: int, folder: Path) -> dict[str, Figures]:
    """Add a token to a cache of ``tokens``: to transformers' own, and to ours."""
    figures, added = dict[str, Figures](), torch.zeros(2, samples, 1, 1, 16)
    for name, has_room in (("of transformers", False), ("with room", True)):
        held = DynamicCache()
        held.update(*torch.zeros(2, samples, 1, tokens, 16), 0)
        if has_room:
            make_room(held)
        held.update(*added, 0)
        of = spent(functools.partial(_draw, held, added))
        figures[name] = {**of, "token_ms": 1000 * of["cpu_s"] / DRAWN}
    return figures


def _draw(held: Any, added: torch.Tensor) -> None:
    for _ in range(DRAWN):
        held.update(*added, 0)


def texts(tokens: int, samples: int, folder: Path) -> dict[str, Figures]:
    codec, group = TokenizerCodec(tiny.tokenizer(), Limits()), group_of(samples, tokens)
    return {"decode": spent(lambda: codec.texts(group.prompt_token_ids, [each.token_ids for each in group.samples]))}


async def bus(tokens: int, samples: int, folder: Path) -> dict[str, Figures]:
    figures: dict[str, Figures] = {}
    with embedded.serving(folder / "valkey") as url:
        connected = await Bus.connect(url, "long", wait_s=10.0)
        experience = make_experience(group_of(samples, tokens))
        data: list[bytes] = []

        async def encode() -> None:
            data.append(wire.encode(experience))

        async def through() -> None:
            await connected.append(streams.EXPERIENCE, {"id": "7", "data": data[0]})
            (taken,) = await connected.read(streams.EXPERIENCE, Experience, "bench", 1, None)
            wire.decode(await connected.whole(taken.data), Experience)

        figures["encode"] = {**await timed(encode), "bytes": len(data[0])}
        figures["send and read"] = await timed(through)
        await connected.close()
    return figures


async def score(tokens: int, samples: int, folder: Path) -> dict[str, Figures]:
    figures: dict[str, Figures] = {}
    run = Settings.model_validate({"reward": {"scorers": SCORERS}})
    for of in run.reward.scorers:
        scorer = make_scorer(of, run)
        await scorer.start()
        for family, text in FAMILIES.items():
            group = group_of(samples, tokens, text)
            answer = "A" if of.name == "choice" else "42"
            group = dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, answer=answer))
            figures[f"{of.name}: {family}"] = await timed(functools.partial(scorer.score, group))
        await scorer.close()
    return figures


def pack(tokens: int, samples: int, folder: Path) -> dict[str, Figures]:
    group = group_of(samples, tokens)
    row = PackedRow(group.prompt_token_ids, group.samples, tuple(range(samples)))
    ((batch,),) = plan([row], samples * tokens + 64, 1)
    laid_out, _ = rectangles(batch.segments, torch.device("cpu"))
    masks = [rectangle.mask_GQK for rectangle in laid_out]
    return {
        "layout": {
            **spent(lambda: rectangles(batch.segments, torch.device("cpu"))),
            "bytes": sum(mask.nbytes for mask in masks if isinstance(mask, torch.Tensor)),
        },
        "contexts": spent(lambda: find_contexts(group, 9, {PolicyVersion(7): 7, PolicyVersion(8): 8}, 1, "mask")),
        "micro-batches": spent(lambda: plan([row], tokens + 64, 1)),
    }


def train(tokens: int, samples: int, folder: Path) -> dict[str, Figures]:
    group, trained = group_of(1, tokens), Policy(policy(tokens)).train()
    row = PackedRow(group.prompt_token_ids, group.samples, (0,))
    ((batch,),) = plan([row], tokens + 64, 1)

    def step() -> None:
        trained(batch).policy_logprobs_N.mean().backward()

    figures = spent(step)
    return {"forward and backward": {**figures, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}}


async def page(tokens: int, samples: int, folder: Path) -> dict[str, Figures]:
    """The records of a trained group, and the page's requests for it."""
    figures: dict[str, Figures] = {}
    experience = make_experience(group_of(samples, tokens))
    group = experience.group.group_id
    tiny.save(folder / "policy")
    with embedded.serving(folder / "valkey") as url:
        connected = await Bus.connect(url, "long", wait_s=10.0)
        parts = make(connected, run_settings(folder, coordinator={"sample_every_steps": 1}))
        run = Settings.model_validate(
            {
                "policy": {"model": str(folder / "policy")},
                "run": {"folder": parts.api.folder.parent, "id": parts.api.folder.name},
            }
        )
        logprobs = {number: sample.behavior_logprobs for number, sample in enumerate(experience.group.samples)}
        figures["record tokens"] = spent(lambda: TokenRecorder(run).record(PolicyVersion(5), experience, logprobs))
        fields = {"step": "1", "version": "5", "data": wire.encode(experience)}
        entry = await connected.append(streams.JOURNAL, fields)
        line = journal_line("1-0", {b"step": b"1", b"version": b"5"}, experience)
        (parts.api.folder / "rollouts.jsonl").write_text(
            "".join(f"{json.dumps({**line, 'entry': f'{n}-0'})}\n" for n in range(1, 51))
        )
        figures["report"] = spent(lambda: write_report(parts.api.folder))
        transport = httpx.ASGITransport(make_app(parts.api))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600.0) as http:
            for name, path in {
                "groups": "?limit=50", "excerpts": "?limit=5&excerpt=400", "search": "?search=not+there&limit=5",
                "group": f"/{entry}", "first tokens": f"/{entry}/tokens?limit=1000",
                "last tokens": f"/{entry}/tokens?completion={samples - 1}&first={tokens - 1000}",
            }.items():  # fmt: skip
                sizes: list[int] = []

                async def get(path: str = path, sizes: list[int] = sizes) -> None:
                    sizes.append(len((await http.get(f"/v1/run/rollouts{path}")).raise_for_status().content))

                figures[name] = {**await timed(get), "bytes": sizes[0]}
        await connected.close()
    assert group == experience.group_id
    return figures


STAGES: dict[str, Callable[[int, int, Path], Any]] = {
    "texts": texts, "cache": cache, "bus": bus, "score": score, "pack": pack, "page": page, "decode": decode, "train": train,
}  # fmt: skip


def measured(stage: str, tokens: int, samples: int) -> dict[str, Figures]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        made = STAGES[stage](tokens, samples, Path(folder))
        figures: dict[str, Figures] = asyncio.run(made) if asyncio.iscoroutine(made) else made
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--only", nargs="*", choices=STAGES, default=[*STAGES])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shown: dict[str, Any] = {"benchmark": "long_samples", "tokens": arguments.tokens, "samples": arguments.samples}
    for stage in arguments.only:
        half, whole = (
            measured(stage, tokens, arguments.samples) for tokens in (arguments.tokens // 2, arguments.tokens)
        )
        shown[stage] = {
            name: {key: round(value, 4) for key, value in of.items()}
            | {"growth": round(of["cpu_s"] / max(1e-4, half[name]["cpu_s"]), 2)}
            for name, of in whole.items()
        }
        print(stage, json.dumps(shown[stage]), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(shown, indent=1) + "\n")
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
