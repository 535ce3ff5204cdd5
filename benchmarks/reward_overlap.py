"""Whether a group takes as long as its slowest scorer, or as all together.

Scorers: the answer matcher with computer algebra (processes), a format rule, a random reward model (thread). Medians
over groups:

    overlap_ratio    together / the slowest alone: 1 is perfect overlap
    sum_ratio        together / the sum of all alone: 1 is no overlap
    loop_lag_p99_ms  delay of a 1 ms timer while the model computes

``in_flight_groups_per_s``: the model's rate with many groups at a time; ``group_rate_alone_per_s``: one at a time.

    python -m benchmarks.reward_overlap --groups 30
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

from penstock.services.reward.scoring import Scoring
from penstock.services.reward.service import make_scoring
from penstock.shared.bus.messages import FinishReason, GroupId, Prompt, RolloutGroup, Sample, Sampling
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings

CHARACTERS = "0123456789+-= abcdefghijklmnopqrstuvwxyz\\{}^()"
Scorer: TypeAlias = dict[str, object]
ANSWER: Scorer = {"kind": "answer", "mode": "math", "extract": "boxed", "processes": 1}
FORMAT: Scorer = {"kind": "format", "pattern": ".*=.*"}


def save_model(folder: Path, hidden: int, layers: int) -> None:
    """Write a random classifier with one token per character."""
    torch.manual_seed(0)
    vocabulary = {token: place for place, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    config = Qwen2Config(
        vocab_size=len(vocabulary), hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def make_group(number: int, samples: int) -> RolloutGroup:
    """Return a group of distinct answers that need computer algebra."""
    root = 11 + number
    texts = [f"{'so ' * (5 + 4 * place)}\\boxed{{\\sqrt{{{(root + place) ** 2}}}}}" for place in range(samples)]
    spans = np.array([[0, 0]], dtype=np.int32)
    made = tuple(
        Sample(np.zeros(1, np.int32), np.zeros(1, np.float32), spans, FinishReason.STOP, text) for text in texts
    )
    prompt = Prompt(
        GroupId(number),
        f"bench:{number}",
        Sampling(samples, 256, 1.0),
        text=f"{root}+0=",
        answer=f"\\sqrt{{{root**2}}}",
    )
    return RolloutGroup(prompt, np.zeros(1, np.int32), made, "bench", 0.0, 0.0)


@contextlib.asynccontextmanager
async def scoring(scorers: Sequence[Scorer]) -> AsyncIterator[Scoring]:
    """Yield the service's scoring with ``scorers``."""
    made = make_scoring(Settings.model_validate({"reward": {"scorers": list(scorers)}}), Status())
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def seconds(of: Scoring, group: RolloutGroup) -> float:
    """Return the time of one group."""
    started_s = time.perf_counter()
    await of(group)
    return time.perf_counter() - started_s


async def loop_lags_ms(stop: asyncio.Event) -> list[float]:
    """Return the delays of 1 ms timers until ``stop``."""
    lags_ms = []
    while not stop.is_set():
        started_s = time.perf_counter()
        await asyncio.sleep(0.001)
        lags_ms.append(1000 * (time.perf_counter() - started_s) - 1.0)
    return lags_ms


async def measure(arguments: argparse.Namespace, model: Scorer) -> dict[str, object]:
    """Return the result."""
    fresh = itertools.count()  # distinct answers avoid the matcher's cache
    by_name: dict[str, list[Scorer]] = {"answer": [ANSWER], "format": [FORMAT], "model": [model]}
    by_name["together"] = [ANSWER, FORMAT, model]
    times_s: dict[str, list[float]] = {name: [] for name in by_name}
    async with contextlib.AsyncExitStack() as stack:
        made = {name: await stack.enter_async_context(scoring(scorers)) for name, scorers in by_name.items()}
        for place in range(arguments.groups + 1):
            for name, scorer in made.items():
                spent_s = await seconds(scorer, make_group(next(fresh), arguments.samples))
                if place:  # the first warms up
                    times_s[name].append(spent_s)
        many = [make_group(next(fresh), arguments.samples) for _ in range(arguments.groups)]
        in_flight = await all_at_once(made["model"], many)
    return figures(times_s) | in_flight


async def all_at_once(of: Scoring, groups: Sequence[RolloutGroup]) -> dict[str, object]:
    """Return the rate of many groups at a time, and loop delays."""
    stop = asyncio.Event()
    watching = asyncio.create_task(loop_lags_ms(stop))
    started_s = time.perf_counter()
    await asyncio.gather(*(of(group) for group in groups))
    busy_s = time.perf_counter() - started_s
    stop.set()
    lag_ms = float(np.percentile(await watching, 99))
    return {"in_flight_groups_per_s": round(len(groups) / busy_s, 2), "loop_lag_p99_ms": round(lag_ms, 2)}


def figures(times_s: dict[str, list[float]]) -> dict[str, object]:
    """Return ratios and medians."""
    medians = {name: statistics.median(times) for name, times in times_s.items()}
    together = medians.pop("together")
    return {
        "overlap_ratio": round(together / max(medians.values()), 3),
        "sum_ratio": round(together / sum(medians.values()), 3),
        "together_ms": round(1000 * together, 2),
        "alone_ms": {name: round(1000 * value, 2) for name, value in medians.items()},
        "group_rate_alone_per_s": round(1 / medians["model"], 2),
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=30)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), arguments.hidden, arguments.layers)
        model: Scorer = {"kind": "model", "model": folder}
        result = asyncio.run(measure(arguments, model))
    print(json.dumps({**result, "samples": arguments.samples, "cpus": os.cpu_count(), "device": arguments.device}))


if __name__ == "__main__":
    main()
