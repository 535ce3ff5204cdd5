"""Packed rows, and the same sequences one by one."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from penstock.services.trainer.batch.packing import PackedRow
from penstock.shared.bus.messages import FinishReason, Sample
from tests.support import tiny

SHAPE = ((5, (4, 1, 6)), (9, (2, 2)), (1, (3,)), (40, (30, 3, 70)), (60, (80,)))
"""Per group: tokens of its prompt, and of each completion."""


def rows(seed: int, shape: Any = SHAPE) -> list[PackedRow]:
    generator = np.random.default_rng(seed)
    collected = []
    for prompt, lengths in shape:
        samples = tuple(
            Sample(
                generator.integers(0, tiny.VOCABULARY, n).astype(np.int32), np.zeros(n, np.float32),
                np.zeros((1, 2), np.int32), FinishReason.STOP, "",
            )
            for n in lengths
        )  # fmt: skip
        ids = generator.integers(0, tiny.VOCABULARY, prompt).astype(np.int32)
        collected.append(PackedRow(ids, samples, tuple(range(len(lengths)))))
    return collected


def placed(of: Iterable[PackedRow]) -> list[PackedRow]:
    """Return the rows with places of their own for all samples, as in a batch."""
    made, place = list[PackedRow](), 0
    for row in of:
        end = place + len(row.samples)
        made.append(dataclasses.replace(row, places=tuple(range(place, end))))
        place = end
    return made


def separate(model: Any, of: list[PackedRow]) -> torch.Tensor:
    """Return the completions' logprobs from one forward pass per sequence (N)."""
    collected = []
    for row in of:
        for sample in row.samples:
            ids = torch.from_numpy(np.concatenate([row.prompt_token_ids, sample.token_ids]).astype(np.int64))
            logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
            collected.append(logprobs[len(row.prompt_token_ids) - 1 :])
    return torch.cat(collected)
