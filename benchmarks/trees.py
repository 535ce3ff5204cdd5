"""A training step on episodes as trees beside the same on their branches.

    python -m benchmarks.trees --turns 30 --episodes 8

Each episode has ``--turns`` turns of 16 sampled tokens with observations of 16, and before each turn a discarded draw of
it. The branches are sequences of their own; each sampled token is trained in its first one. Processor seconds of a forward
and a backward pass of a random model, one thread, the least of three alternating passes. Fails over ``MOST`` of the
branches' time, or where a gradient differs.
"""

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import numpy as np
import torch

from benchmarks.packing import _sample
from services.trainer.batch.packing import PackedRow, micro_batch
from services.trainer.model.policy import Policy
from shared.bus.messages import Int32Array, Sample

MOST = 0.3
VOCABULARY, TURN, PROMPT = 512, 16, 128


def episode(lot: np.random.Generator, prompt: Int32Array, turns: int) -> Sample:
    """Return the question, and for each turn its discarded draw, the turn and an observation."""
    rows, parts, parent, place = [(0, -1, 0)], [prompt], 0, len(prompt)
    for _ in range(turns):
        for above, sampled in ((parent, 1), (parent, 1), (len(rows) + 1, 0)):
            rows.append((place, above, sampled))
            parts.append(lot.integers(0, VOCABULARY, TURN).astype(np.int32))
            place += TURN
        parent = len(rows) - 1
    return dataclasses.replace(_sample(np.concatenate(parts)), segments=np.array(rows, np.int32))


def branches(tree: Sample) -> list[Sample]:
    """Return a linear sample per branch, in which the tokens of earlier branches are given."""
    rows, made, known = tree.segments.tolist(), list[Sample](), set[int]()
    ends = [*(row[0] for row in rows[1:]), len(tree.token_ids)]
    for leaf in sorted(set(range(len(rows))) - {row[1] for row in rows}):
        path, k = list[int](), leaf
        while k >= 0:
            path, k = [k, *path], rows[k][1]
        starts = np.cumsum([0, *(ends[k] - rows[k][0] for k in path[:-1])])
        segments = [
            (int(start), n - 1, int(rows[k][2] and k not in known))
            for n, (start, k) in enumerate(zip(starts, path, strict=True))
        ]
        known.update(path)
        if any(sampled for _, _, sampled in segments):
            ids = np.concatenate([tree.token_ids[rows[k][0] : ends[k]] for k in path])
            made.append(dataclasses.replace(_sample(ids), segments=np.array(segments, np.int32)))
    return made


def model() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).train()


def step(policy: Policy, rows: list[PackedRow]) -> tuple[float, float]:
    """Return processor seconds and the gradient's norm, one forward pass per row."""
    policy.model.zero_grad()
    started_s = time.process_time()
    for row in rows:
        policy(micro_batch([row])).policy_logprobs_N.sum().backward()
    spent_s = time.process_time() - started_s
    return spent_s, float(torch.sqrt(sum(p.grad.double().square().sum() for p in policy.model.parameters())))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--episodes", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lot = np.random.default_rng(0)
    prompt = lot.integers(0, VOCABULARY, PROMPT).astype(np.int32)
    none = np.zeros(0, np.int32)
    trees = [episode(lot, prompt, arguments.turns) for _ in range(arguments.episodes)]
    of_trees = [PackedRow(none, tuple(trees), tuple(range(len(trees))))]
    parts = [branch for tree in trees for branch in branches(tree)]
    of_branches = [PackedRow(none, (branch,), (n,)) for n, branch in enumerate(parts)]
    policy, results = Policy(model(), packing="rows"), []
    for _ in range(3):
        results.append((step(policy, of_trees), step(policy, of_branches)))
    trees_s, branches_s = (min(each[way][0] for each in results) for way in (0, 1))
    norms = [each[way][1] for each in results for way in (0, 1)]
    ratio, apart = trees_s / branches_s, max(norms) / min(norms) - 1
    figures = {
        "benchmark": "trees",
        "ratio": ratio,
        "trees_s": trees_s,
        "branches_s": branches_s,
        "tokens_of_trees": sum(row.tokens for row in of_trees),
        "tokens_of_branches": sum(row.tokens for row in of_branches),
        "branches": len(of_branches),
        "gradient_norms_differ_by": apart,
    }
    print(json.dumps(figures))
    sys.exit(ratio > MOST or apart > 1e-3)


if __name__ == "__main__":
    main()
