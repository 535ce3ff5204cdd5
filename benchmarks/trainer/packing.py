"""Fill and balance of packed micro-batches over 1, 2, 4 and 8 ranks.

    python -m benchmarks.trainer.packing --groups 512 --samples 8 --cap 16384

Lengths are log-normal (median prompt 150, completion 600; 5 % are 5 times longer). ``fill``: tokens / (micro-batches ×
cap); ``imbalance``: the costliest rank's operations over the mean, minus 1; ``padded_fill``: fill of padded rows. Fails
if a limit is missed.
"""

import argparse
import json
import sys
import time

import numpy as np

from penstock.services.trainer.batch.assignment import assign_pieces
from penstock.services.trainer.batch.packing import PackedRow
from penstock.shared.bus.messages import FinishReason, Int32Array, Sample
from penstock.shared.model.flops import ModelSizes

MODEL = ModelSizes(linear_weights=6_525_288_448, attention_width=28 * 28 * 128, output_weights=152_064 * 3584)
"""Qwen2.5-7B."""
LEAST_FILL = 0.95
MOST_IMBALANCE = 0.03


def mix(
    groups: int, samples: int, cap: int, seed: int = 0, *, median: int = 600, vocabulary: int = 1
) -> list[PackedRow]:
    """Return random rows of sequences up to ``cap`` tokens."""
    lot = np.random.default_rng(seed)
    rows = []
    for _ in range(groups):
        prompt = int(np.clip(lot.lognormal(np.log(median / 4), 0.6), 8, cap // 4))
        lengths = np.clip(lot.lognormal(np.log(median), 1.0, samples), 4, cap - prompt).astype(int)
        ids = [_tokens(lot, int(n), vocabulary) for n in (prompt, *lengths)]
        rows.append(PackedRow(ids[0], tuple(_sample(completion) for completion in ids[1:]), tuple(range(samples))))
    return rows


def equal(groups: int, samples: int, tokens: int, vocabulary: int = 1) -> list[PackedRow]:
    """Return random rows of completions of ``tokens`` each, after prompts of 64."""
    lot = np.random.default_rng(0)
    rows = [[_tokens(lot, n, vocabulary) for n in (64, *[tokens] * samples)] for _ in range(groups)]
    return [PackedRow(ids[0], tuple(_sample(of) for of in ids[1:]), tuple(range(samples))) for ids in rows]


def _tokens(lot: np.random.Generator, count: int, vocabulary: int) -> Int32Array:
    return lot.integers(0, vocabulary, count).astype(np.int32) if vocabulary > 1 else np.zeros(count, np.int32)


def _sample(token_ids: Int32Array) -> Sample:
    zeros = np.zeros(len(token_ids), np.float32)
    return Sample(token_ids, zeros, np.zeros((1, 2), np.int32), FinishReason.STOP, "")


def measure(rows: list[PackedRow], cap: int, ranks: int) -> dict[str, float]:
    """Return the metrics of one plan."""
    started_s = time.perf_counter()
    shares = assign_pieces(rows, cap, ranks, sizes=MODEL)
    plan_s = time.perf_counter() - started_s
    chunks = [chunk for share in shares for chunk in share]
    assert len({len(share) for share in shares}) == 1
    assert all(sum(row.tokens for row in chunk) <= cap for chunk in chunks)
    tokens = sum(row.tokens for chunk in chunks for row in chunk)
    costs = [sum(row.flops(MODEL) for chunk in share for row in chunk) for share in shares]
    return {
        "fill": tokens / (len(chunks) * cap),
        "imbalance": max(costs) * ranks / sum(costs) - 1,
        "micro_batches": len(shares[0]),
        "plan_s": plan_s,
    }


def padded_fill(rows: list[PackedRow], cap: int) -> float:
    """Return the fill of sequences padded to a micro-batch's longest."""
    lengths = sorted((len(row.prompt_token_ids) + len(s.token_ids) for row in rows for s in row.samples), reverse=True)
    computed, place = 0, 0
    while place < len(lengths):
        count = max(1, cap // lengths[place])
        computed += len(lengths[place : place + count]) * lengths[place]
        place += count
    return sum(lengths) / computed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--cap", type=int, default=16_384)
    arguments = parser.parse_args()
    rows = mix(arguments.groups, arguments.samples, arguments.cap)
    by_ranks = {ranks: measure(rows, arguments.cap, ranks) for ranks in (1, 2, 4, 8)}
    fill = min(figures["fill"] for figures in by_ranks.values())
    imbalance = max(figures["imbalance"] for figures in by_ranks.values())
    separate = sum(len(row.prompt_token_ids) + len(s.token_ids) for row in rows for s in row.samples)
    print(
        json.dumps(
            {
                "fill": fill,
                "imbalance": imbalance,
                "ranks": by_ranks,
                "padded_fill": padded_fill(rows, arguments.cap),
                "tokens": sum(row.tokens for row in rows),
                "tokens_of_separate_sequences": separate,
            }
        )
    )
    sys.exit(fill < LEAST_FILL or imbalance > MOST_IMBALANCE)


if __name__ == "__main__":
    main()
