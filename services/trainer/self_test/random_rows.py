"""Random rows that the self-test compares, each with a tree of two branches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.services.trainer.batch.packing import PackedRow
from penstock.shared.bus.messages import FinishReason, Int32Array, Sample, no_segments
from penstock.shared.model.causal_model import ordinary_ids

LONGEST_WINDOW = {"cpu": 160, "cuda": 1024}
"""Longest window that is tested, by device type."""
_PROMPT_TOKENS = 140
_COMPLETIONS = ((40, 1, 23), (12, 3))
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size", "local_attention")


def draw(model: Any, device: torch.device, seed: int) -> list[PackedRow]:
    """Return two groups of random tokens; the first exceeds the model's window if that is short."""
    lot, ids = np.random.default_rng(seed), ordinary_ids(model.config)
    crossed = [window for window in windows(model.config) if window <= LONGEST_WINDOW.get(device.type, 0)]
    context = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20)
    completions = [[max(1, min(length, context // 3)) for length in lengths] for lengths in _COMPLETIONS]
    longest = max(2, context - max(map(max, completions)))
    prompts = [min(longest, max([_PROMPT_TOKENS, *(window + 8 for window in crossed)])), min(longest, 9)]
    return [
        _row(lot.choice(ids, prompt), [lot.choice(ids, length) for length in lengths], temperature, place)
        for prompt, lengths, temperature, place in zip(prompts, completions, (1.0, 0.7), (0, 3), strict=True)
    ]


def windows(config: Any) -> list[int]:
    values = (getattr(config.get_text_config(), name, None) for name in _WINDOWS)
    return [window for window in values if isinstance(window, int) and window > 0]


def _tree(tokens: int) -> Int32Array:
    """Return a turn, given tokens and a turn after them; another turn after the first."""
    return np.array([[0, -1, 1], [tokens // 3, 0, 0], [tokens // 2, 1, 1], [3 * tokens // 4, 0, 1]], np.int32)


def _row(prompt: Any, completions: Sequence[Any], temperature: float, place: int) -> PackedRow:
    samples = tuple(
        Sample(
            token_ids=ids,
            segments=_tree(len(ids)) if number == 0 and len(ids) > 3 else no_segments(),
            behavior_logprobs=np.zeros(len(ids), np.float32),
            version_spans=np.zeros((1, 2), np.int32),
            finish_reason=FinishReason.LENGTH,
            text="",
        )
        for number, ids in enumerate(completions)
    )
    return PackedRow(prompt, samples, tuple(range(place, place + len(samples))), temperature)
