"""A training step on episodes as trees beside the same on their branches.

    python -m benchmarks.trainer.trees --turns 30 --episodes 8
    python -m benchmarks.trainer.trees --shape 0.5b --device cuda --turn 64 --prompt 2048
    python -m benchmarks.trainer.trees --shape 0.5b --device cuda --turn 512 --prompt 16384 --draws 8 --most 0.2

Each episode has ``--turns`` turns of ``--turn`` sampled tokens with observations as long, and before each turn a discarded
draw of it; or, with ``--draws``, that many sampled continuations of a history of ``--prompt`` tokens. The branches are
sequences of their own, as many at a time as ``--budget`` tokens hold; each sampled token is trained in its first one.
Seconds of a forward and a backward pass of a random model, the least of three alternating passes: of the processor, one
thread, or on a GPU by the clock. Fails over ``--most`` of the branches' time, or where a gradient differs.
"""

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import numpy as np
import torch

from benchmarks.shapes import SHAPES
from benchmarks.trainer.models import random_model
from benchmarks.trainer.packing import _sample
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.model.policy import Policy
from penstock.shared.bus.messages import Sample
from penstock.shared.settings import Settings

APART = {"cpu": 1e-3, "cuda": 2e-2}
"""Between the norms of gradients in float32, and in bfloat16."""


def episode(lot: np.random.Generator, arguments: argparse.Namespace, vocabulary: int) -> Sample:
    """Return the question, and for each turn its discarded draw, the turn and an observation; or a history and draws."""
    prompt = lot.integers(0, vocabulary, arguments.prompt).astype(np.int32)
    rows, parts, parent, place = [(0, -1, 0)], [prompt], 0, len(prompt)

    def add(above: int, sampled: int) -> None:
        nonlocal place
        rows.append((place, above, sampled))
        parts.append(lot.integers(0, vocabulary, arguments.turn).astype(np.int32))
        place += arguments.turn

    for _ in range(arguments.draws):
        add(0, 1)
    for _ in range(0 if arguments.draws else arguments.turns):
        for above, sampled in ((parent, 1), (parent, 1), (len(rows) + 1, 0)):
            add(above, sampled)
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


def model(shape: str, device: str) -> Any:
    """Return a random model: of two layers without a shape."""
    small = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    torch.manual_seed(0)
    dtype = "float32" if device == "cpu" else "bfloat16"
    of = Settings.model_validate({"policy": {"model": "", "dtype": dtype}, "data": {"path": "prompts.jsonl"}})
    return random_model(SHAPES[shape] if shape else small, of, device).to(device).train()


def batched(rows: list[PackedRow], budget: int) -> list[list[PackedRow]]:
    """Return rows, as many together as ``budget`` tokens hold."""
    made = list[list[PackedRow]]()
    for row in rows:
        if made and sum(each.tokens for each in made[-1]) + row.tokens <= budget:
            made[-1].append(row)
        else:
            made.append([row])
    return made


def step(policy: Policy, batches: list[list[PackedRow]], device: str) -> tuple[float, float]:
    """Return seconds and the gradient's norm, one forward pass per batch."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    policy.model.zero_grad()
    started_s = clock()
    for rows in batches:
        policy(micro_batch(rows)).policy_logprobs_N.sum().backward()
    if device != "cpu":
        torch.cuda.synchronize()
    spent_s = clock() - started_s
    return spent_s, float(torch.sqrt(sum(p.grad.double().square().sum() for p in policy.model.parameters())))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--episodes", type=int, default=0, help="default: 8, or 1 with --draws")
    parser.add_argument("--draws", type=int, default=0)
    parser.add_argument("--turn", type=int, default=16, help="tokens")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--budget", type=int, default=0, help="tokens of branches at a time; 0: one branch")
    parser.add_argument("--shape", default="", choices=("", *SHAPES))
    parser.add_argument("--device", default="cpu", choices=tuple(APART))
    parser.add_argument("--most", type=float, default=0.3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lot, none, device = np.random.default_rng(0), np.zeros(0, np.int32), arguments.device
    on_device = model(arguments.shape, device)
    vocabulary = on_device.config.vocab_size
    episodes = arguments.episodes or (1 if arguments.draws else 8)
    trees = [episode(lot, arguments, vocabulary) for _ in range(episodes)]
    of_trees = [[PackedRow(none, (tree,), (n,))] for n, tree in enumerate(trees)]
    parts = [branch for tree in trees for branch in branches(tree)]
    of_branches = batched([PackedRow(none, (branch,), (n,)) for n, branch in enumerate(parts)], arguments.budget)
    policy, results = Policy(on_device, packing="rows", chunk_tokens=2048), []
    for _ in range(4 if device != "cpu" else 3):
        results.append((step(policy, of_trees, device), step(policy, of_branches, device)))
    trees_s, branches_s = (min(each[way][0] for each in results) for way in (0, 1))
    norms = [each[way][1] for each in results for way in (0, 1)]
    ratio, apart = trees_s / branches_s, max(norms) / min(norms) - 1
    figures = {
        "benchmark": "trees",
        "ratio": ratio,
        "trees_s": trees_s,
        "branches_s": branches_s,
        "tokens_of_trees": sum(row.tokens for rows in of_trees for row in rows),
        "tokens_of_branches": sum(row.tokens for rows in of_branches for row in rows),
        "branches": len(parts),
        "passes_of_branches": len(of_branches),
        "gradient_norms_differ_by": apart,
    }
    print(json.dumps(figures))
    sys.exit(ratio > arguments.most or apart > APART[device])


if __name__ == "__main__":
    main()
