"""Random groups of trees, and their branches one by one."""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.model.trunk import Packing
from penstock.shared.bus.messages import FinishReason, Int32Array, Sample
from penstock.shared.model.rope import settle_rope
from tests.support import model_zoo
from tests.support.model_configurations import VOCABULARY


def tree(
    generator: np.random.Generator, vocabulary: int, opening: Int32Array, *, own_prompt: bool, segments: int = 9
) -> Sample:
    """Return a random tree that begins with ``opening``, given; at least one segment is sampled."""
    rows, parts = [(0, -1, 0)], [opening]
    path, place = [0], len(opening)
    while len(rows) < segments or not any(row[2] for row in rows):
        kept = int(generator.integers(0 if not own_prompt else 1, len(path) + 1))
        path = path[: max(kept, len(path) - 3)]
        parent = path[-1] if path else -1
        length = int(generator.integers(1, 12))
        rows.append((place, parent, int(generator.random() < 0.6)))
        parts.append(generator.integers(3, vocabulary, length).astype(np.int32))
        path.append(len(rows) - 1)
        place += length
    ids = np.concatenate(parts)
    return Sample(
        ids, np.zeros(len(ids), np.float32), np.zeros((1, 2), np.int32), FinishReason.STOP, "",
        segments=np.array(rows, np.int32),
    )  # fmt: skip


def group(
    seed: int, vocabulary: int, prompt: int = 5, samples: int = 3, opening: int = 7, segments: int = 9
) -> PackedRow:
    """Return trees whose openings begin alike, and a plain completion if there is a prompt."""
    generator = np.random.default_rng(seed)
    common = generator.integers(3, vocabulary, opening).astype(np.int32)
    made = []
    for _ in range(samples):
        own = generator.integers(3, vocabulary, int(generator.integers(0, 4))).astype(np.int32)
        begun = np.concatenate((common[: int(generator.integers(1, opening + 1))], own))
        made.append(tree(generator, vocabulary, begun, own_prompt=not prompt, segments=segments))
    if prompt:
        ids = generator.integers(3, vocabulary, 6).astype(np.int32)
        made.insert(1, Sample(ids, np.zeros(6, np.float32), np.zeros((1, 2), np.int32), FinishReason.STOP, ""))
    ids = generator.integers(3, vocabulary, prompt).astype(np.int32)
    return PackedRow(ids, tuple(made), tuple(range(len(made))), 0.5)


def alike(seed: int, vocabulary: int, *, prompt: int = 6, samples: int = 4, tokens: int = 12) -> PackedRow:
    """Return plain completions that begin alike; the last one is the beginning of the first."""
    generator = np.random.default_rng(seed)
    whole = generator.integers(3, vocabulary, (samples, tokens)).astype(np.int32)
    ids = [np.concatenate((whole[0, : 3 * number], whole[number, 3 * number :])) for number in range(samples)]
    made = [
        Sample(own, np.zeros(len(own), np.float32), np.zeros((1, 2), np.int32), FinishReason.STOP, "")
        for own in (*ids, ids[0][: tokens // 2])
    ]
    opening = generator.integers(3, vocabulary, prompt).astype(np.int32)
    return PackedRow(opening, tuple(made), tuple(range(len(made))), 0.5)


def branches(row: PackedRow) -> Iterator[tuple[int, Int32Array, list[int]]]:
    """Yield (sample, ids of the prompt and of a branch, their places in the sample; −1 in the prompt) of every branch."""
    for number, sample in enumerate(row.samples):
        rows = sample.segments.tolist() or [[0, -1, 1]]
        ends = [*(start for start, _, _ in rows[1:]), len(sample.token_ids)]
        parents = {parent for _, parent, _ in rows}
        for leaf in range(len(rows)):
            if leaf in parents:
                continue
            path, k = list[int](), leaf
            while k >= 0:
                path, k = [*range(rows[k][0], ends[k]), *path], rows[k][1]
            places = [-1] * len(row.prompt_token_ids) + path
            yield number, np.concatenate((row.prompt_token_ids, sample.token_ids[path])), places


def branch_logprobs(model: Any, of: list[PackedRow]) -> Tensor:
    """Return the logprobs of all sampled tokens in sample order, each from its first branch, one forward pass a branch."""
    collected: list[Tensor] = []
    for row in of:
        own: dict[tuple[int, int], Tensor] = {}
        for number, ids, places in branches(row):
            whole = torch.from_numpy(ids.astype(np.int64))[None]
            logits = model(input_ids=whole, use_cache=False).logits[0, :-1] / row.temperature
            logprobs = logits.log_softmax(-1).gather(-1, whole[0, 1:, None])[:, 0]
            sampled = row.samples[number].sampled
            for place, logprob in zip(places[1:], logprobs, strict=True):
                if place >= 0 and sampled[place]:
                    own.setdefault((number, place), logprob)
        collected += [own[key] for key in sorted(own)]
    return torch.stack(collected)


def trie_tokens(row: PackedRow) -> int:
    """Count the distinct prefixes that a trained token needs: of given tokens, and in merged rows all, by their ids, of sampled
    ones by their place.
    """
    needed = {tuple(row.prompt_token_ids[: n + 1].tolist()) for n in range(len(row.prompt_token_ids))}
    for number, ids, places in branches(row):
        sampled, prefix, prefixes = row.samples[number].sampled, tuple[Any, ...](), list[tuple[Any, ...]]()
        for token, place in zip(ids.tolist(), places, strict=True):
            shared = (
                row.is_merged or place < 0 or (not sampled[place] and not any(type(each) is tuple for each in prefix))
            )
            prefix = (*prefix, token if shared else (number, place))
            prefixes.append(prefix)
        last = max((n for n, place in enumerate(places) if place >= 0 and sampled[place]), default=0)
        needed.update(prefixes[:last])
    return len(needed)


SHAPES = ((0, 140, 5), (1, 0, 150))
"""Per micro-batch of 3 trees: seed, tokens of the prompt, of the opening. Longer than windows of 24, and forked (128)."""

_CONTEXT = 170
"""Tokens of the longest sequence of ``model_zoo.LONG``."""


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Have models compute in float64 what they compute in float32."""
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    scan, single = RecurrentGemmaRglru._rnn_scan, torch.float32
    defaults = tuple(torch.float64 if value is single else value for value in scan.__defaults__)
    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.object(torch, "float32", torch.float64),
            mock.patch.object(torch, "float", torch.float64),
            mock.patch.object(Tensor, "float", Tensor.double),
            mock.patch.object(scan, "__defaults__", defaults),
        ):
            yield
    finally:
        torch.set_default_dtype(single)


def compare(
    name: str, packing: Packing = "rows", shapes: Iterable[tuple[int, int, int]] = SHAPES
) -> list[model_zoo.Gap]:
    """Return how far micro-batches of trees of a configuration of the zoo are from their branches, in float64."""
    with tempfile.TemporaryDirectory() as folder, model_zoo.quiet():
        model_zoo.save(name, Path(folder))
        model = model_zoo.reference(Path(folder))
        policy = model_zoo.open_policy(Path(folder), model_zoo.groups(model_zoo.LONG), packing).eval()
    settle_rope(model, _CONTEXT)  # fixed per run, by its longest sequence
    for of in (model, policy.model):
        of.double()
        if hasattr(of, "set_experts_implementation"):
            of.set_experts_implementation("eager")  # grouped products know no float64
    with float64():
        return [_gap(policy, model, *shape) for shape in shapes]


def _gap(policy: Policy, model: Any, seed: int, prompt: int, opening: int) -> model_zoo.Gap:
    of = VOCABULARY
    rows = [
        group(seed, of, prompt, samples=2, opening=opening, segments=6),
        group(seed + 1000, of, 2, samples=1, segments=6),
        alike(seed, of),
    ]
    batch = micro_batch(rows)
    if policy.trunk.packing == "rows" and batch.tokens != sum(map(trie_tokens, rows)):
        raise AssertionError(f"expected {sum(map(trie_tokens, rows))} computed tokens, found {batch.tokens}")
    mine, theirs = policy(batch).policy_logprobs_N, branch_logprobs(model, rows)
    weights_N = torch.randn(len(mine), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    apart = float((mine - theirs).detach().abs().max())
    return model_zoo.Gap(apart, model_zoo.gradient_gap(policy.model, mine @ weights_N, model, theirs @ weights_N))
